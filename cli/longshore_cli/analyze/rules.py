"""Evaluates the CEL rules of a CRD, with the functions on quantities that the API server has. Called by `definition`.

The only file that imports the CEL library, and only to evaluate a rule: other commands start without it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from longshore_spec.quantity import QuantityError, parse_number

if TYPE_CHECKING:
    import celpy


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
        try:
            return _Quantity(parse_number(str(text)))
        except QuantityError as error:
            raise CELEvalError(str(error)) from error

    def is_quantity(text: object) -> celtypes.BoolType:
        try:
            parse_number(str(text))
        except QuantityError:
            return celtypes.BoolType(False)
        return celtypes.BoolType(True)

    def compare_to(one: _Quantity, other: _Quantity) -> celtypes.IntType:
        return celtypes.IntType((one.value > other.value) - (one.value < other.value))

    def as_approximate_float(one: _Quantity) -> celtypes.DoubleType:
        return celtypes.DoubleType(float(one.value))

    functions: dict[str, Any] = {
        "quantity": quantity,
        "isQuantity": is_quantity,
        "compareTo": compare_to,
        "asApproximateFloat": as_approximate_float,
    }
    environment = celpy.Environment()
    return environment.program(environment.compile(rule), functions=functions)
