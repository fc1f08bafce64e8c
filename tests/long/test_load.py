"""The busy loops beside the gate in `make test-flaky`."""

import time

from tests.long.load import busy_loops
from tests.rigs.ends import OWN

DEADLINE_SECONDS = 60.0


def test_busy_loops_compute_until_the_block_ends() -> None:
    before = {process.identity for process in OWN.living()}
    with busy_loops(2):
        deadline = time.monotonic() + DEADLINE_SECONDS
        while True:
            loops = [process for process in OWN.living() if process.identity not in before]
            if len(loops) == 2 and all(process.cpu_seconds > 0.2 for process in loops):
                break
            assert time.monotonic() < deadline, loops
    assert {process.identity for process in OWN.living()} <= before
