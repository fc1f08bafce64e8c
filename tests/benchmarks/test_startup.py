"""The benchmarks of starts: every command's, with aims that are met or not, and a killed run's, with its parts."""

import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks.restart import ARMS, FIGURES, parts_of
from benchmarks.restart import results as restart_results
from benchmarks.restart import table as restart_table
from benchmarks.startup import BARE, COMMANDS, IMPORT, STARTING, aims, arms, measured, results, table
from jobs.stages import STAGES
from pipeline.runs.starts import START_SPANS
from shards.files.local_files import append_line


def test_every_stage_is_measured_and_a_start_is_a_time() -> None:
    assert {words[0] for words in COMMANDS if words and words[0] in STAGES} == set(STAGES)
    assert len(arms()) == len(set(arms())) == len(COMMANDS) + 3
    report = measured("patchline --version")
    assert 0 < report["cpu_seconds"] < 60
    assert report["wall_seconds"] > 0


def test_training_is_measured_until_it_says_that_it_starts() -> None:
    assert 0 < measured(" ".join(("patchline", *STARTING)))["wall_seconds"] < 60


def test_aims_are_beyond_the_interpreters_own_start() -> None:
    figures = {name: {"wall_seconds": 0.3, "cpu_seconds": 0.2} for name in arms()}
    one = {
        **figures,
        BARE: {"wall_seconds": 0.1, "cpu_seconds": 0.1},
        IMPORT: {"wall_seconds": 0.4, "cpu_seconds": 0.2},
    }
    slowest, imported, starting = (aim.row() for aim in aims([one]))
    assert [round(row["found"][1], 6) for row in (slowest, imported, starting)] == [0.2, 0.3, 0.3]
    assert (slowest["met"], imported["met"], starting["met"]) == (True, False, True)
    kept = results([one], 1)
    assert kept["command"].startswith("python -m benchmarks.startup --rounds 1 --out")
    assert "| `patchline --help` | 0.30 | 0.20 |" in table(kept["arms"])


def test_the_parts_sum_to_the_time_from_the_kill_to_the_step(tmp_path: Path) -> None:
    for name, stamp in (("0/rank-0", 10.5), ("0/rank-1", 11.0), ("1/started", 11.25)):
        path = tmp_path / "submit" / f"exits-7-0-{name}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        os.utime(path, (stamp, stamp))
    parts: dict[str, float] = {str(part): 0.5 for part in START_SPANS}
    append_line(tmp_path / "starts.jsonl", {"attempt": "2", "unix_time": 20.0, "parts": parts})
    found = parts_of(tmp_path, job=7, killed=10.0)
    around = {"noticed": 0.5, "ranks_ended": 0.5, "next_try": 0.25, "process": 4.25}
    assert found == {**around, **parts, "whole": 10.0}
    assert sum(value for name, value in found.items() if name != "whole") == pytest.approx(found["whole"])


def test_a_round_is_shown_with_every_part() -> None:
    figures: dict[str, Any] = dict.fromkeys(FIGURES, 1.0)
    one = dict.fromkeys(ARMS, figures)
    kept = restart_results([one], 1)
    assert kept["command"].startswith("python -m benchmarks.restart --rounds 1 --out")
    assert "| whole | 1.00 | 1.00 | 1.00 |" in restart_table(kept["arms"])
