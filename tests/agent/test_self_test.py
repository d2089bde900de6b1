"""The self-test's answer: one line of JSON, whatever a transport's library prints beside it."""

from __future__ import annotations

import subprocess
import sys

import msgspec

from longshore_agent.status.snapshot import SelfTest

# As UCX does on a busy machine, from C, past Python's own buffers.
LOUD = """
import os, sys
from longshore_agent import self_test
honest = self_test.create
def loud(*words):
    os.write(1, b"UCX  WARN  the clock is unstable\\n")
    return honest(*words)
self_test.create = loud
sys.argv = ["self_test"]
sys.exit(self_test.main())
"""


def test_what_a_library_prints_is_no_part_of_the_answer_and_is_seen_in_the_log() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOUD],
        env={"LONGSHORE_BACKEND": "Loopback", "PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": "1"},
        check=False,
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    found = msgspec.json.decode(done.stdout, type=SelfTest)
    assert found.bytes_moved == 1 << 20
    assert b"the clock is unstable" in done.stderr
