"""The threads benchmark: a busy machine is busy and idle again afterwards; every setting has a row."""

import time
from pathlib import Path

from benchmarks.threads import BUSY, SETTINGS, busy, table

DEADLINE_SECONDS = 30.0


def test_the_busy_processes_end_with_the_measurement() -> None:
    with busy(2) as burners:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not all("while True" in Path(f"/proc/{pid}/cmdline").read_text() for pid in burners):
            assert time.monotonic() < deadline, "they do not begin"
    assert [pid for pid in burners if Path(f"/proc/{pid}").exists()] == []


def test_the_table_has_a_row_a_setting() -> None:
    found = {f"{where}: {setting}": [1.0, 2.0, 3.0] for where in BUSY for setting in SETTINGS}
    lines = table(found).splitlines()
    assert len(lines) == 2 + len(SETTINGS)
    assert lines[2] == "| spinning (libgomp's own) | 2 (1 to 3) | 2 (1 to 3) |"
