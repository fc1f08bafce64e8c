"""The restart benchmark: what it reads of a run that was killed and has continued."""

import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks.restart import ARMS, FIGURES, parts_of, results, table
from pipeline.training.start_parts import START_PARTS
from pipeline.training.starts import append_line


def test_the_parts_sum_to_the_time_from_the_kill_to_the_step(tmp_path: Path) -> None:
    for name, stamp in (("0/rank-0", 10.5), ("0/rank-1", 11.0), ("1/started", 11.25)):
        path = tmp_path / "submit" / f"exits-7-0-{name}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        os.utime(path, (stamp, stamp))
    parts: dict[str, float] = {str(part): 0.5 for part in START_PARTS}
    append_line(tmp_path / "starts.jsonl", {"attempt": "2", "unix_time": 20.0, "parts": parts})
    found = parts_of(tmp_path, job=7, killed=10.0)
    around = {"noticed": 0.5, "ranks_ended": 0.5, "next_try": 0.25, "process": 4.25}
    assert found == {**around, **parts, "whole": 10.0}
    assert sum(value for name, value in found.items() if name != "whole") == pytest.approx(found["whole"])


def test_a_round_is_shown_with_every_part() -> None:
    figures: dict[str, Any] = dict.fromkeys(FIGURES, 1.0)
    one = dict.fromkeys(ARMS, figures)
    kept = results([one], 1)
    assert kept["command"].startswith("python -m benchmarks.restart --rounds 1 --out")
    assert "| whole | 1.00 | 1.00 | 1.00 |" in table(kept["arms"])
