"""Evaluates the CEL rules of a CRD, with the functions on quantities that the API server has. Called by `definition`.

The only file that imports the CEL library, and only to evaluate a rule: other commands start without it.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import celpy

_FACTORS: dict[str, int | Fraction] = {
    "": 1,
    **{suffix: Fraction(1, 1000**power) for power, suffix in enumerate(("m", "u", "n"), 1)},
    **{suffix: 1000**power for power, suffix in enumerate("kMGTPE", 1)},
    **{f"{suffix}i": 1024**power for power, suffix in enumerate("KMGTPE", 1)},
}
_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]*)?)([A-Za-z]{0,2})")


@dataclass(frozen=True, slots=True)
class _Quantity:
    value: Fraction


def broken(rule: str, value: Any, before: Any = None) -> bool:
    """Return whether `value` breaks a rule, in which it is `self` and `before`, the current value, is `oldSelf`.

    Raises:
        ValueError: the rule has no answer, for example as a field that it reads is missing; with the library's words.
    """
    from celpy.adapter import json_to_cel
    from celpy.evaluation import CELEvalError

    try:
        found = _program(rule).evaluate({"self": json_to_cel(value), "oldSelf": json_to_cel(before)})
    except CELEvalError as error:
        raise ValueError(str(error.args[0])) from error
    return not bool(found)


@functools.cache
def _program(rule: str) -> celpy.Runner:
    import celpy
    from celpy import celtypes
    from celpy.evaluation import CELEvalError

    def quantity(text: object) -> _Quantity:
        match = _QUANTITY.fullmatch(str(text))
        if match is None or match[2] not in _FACTORS:
            raise CELEvalError(f"{text} is not a quantity")
        return _Quantity(Fraction(match[1]) * _FACTORS[match[2]])

    def compare_to(one: _Quantity, other: _Quantity) -> celtypes.IntType:
        return celtypes.IntType((one.value > other.value) - (one.value < other.value))

    def as_approximate_float(one: _Quantity) -> celtypes.DoubleType:
        return celtypes.DoubleType(float(one.value))

    functions: dict[str, Any] = {
        "quantity": quantity,
        "compareTo": compare_to,
        "asApproximateFloat": as_approximate_float,
    }
    environment = celpy.Environment()
    return environment.program(environment.compile(rule), functions=functions)
