"""The threads' benchmark: a busy machine is busy, and left as it was; every setting has a row."""

from pathlib import Path

from benchmarks.threads import BUSY, SETTINGS, busy, table


def test_the_busy_processes_end_with_the_measurement() -> None:
    with busy(2) as burners:
        names = [Path(f"/proc/{pid}/cmdline").read_text() for pid in burners]
        assert all("while True" in name for name in names)
    assert [pid for pid in burners if Path(f"/proc/{pid}").exists()] == []


def test_the_table_has_a_row_a_setting() -> None:
    found = {f"{where}: {setting}": [1.0, 2.0, 3.0] for where in BUSY for setting in SETTINGS}
    lines = table(found).splitlines()
    assert len(lines) == 2 + len(SETTINGS)
    assert lines[2] == "| spinning (libgomp's own) | 2 (1 to 3) | 2 (1 to 3) |"
