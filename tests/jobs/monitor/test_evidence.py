"""What a run left, of its last try alone, whatever else stands in its folder."""

import json
import os
from pathlib import Path

import pytest

from jobs.monitor.evidence import evidence_of
from shards.errors import UserError
from tests.jobs.reports.test_ls import make

NO_SLURM = {"PATH": "/nowhere"}


def write_log(run_dir: Path, *lines: str) -> None:
    (run_dir / "submit").mkdir(exist_ok=True)
    (run_dir / "submit" / "x-12.out").write_text("".join(f"{line}\n" for line in lines))


def write_exits(run_dir: Path, **codes: str) -> None:
    """In the order in which the ranks ended."""
    folder = run_dir / "submit" / "exits-12-0-0"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "started").touch()
    for at, (rank, code) in enumerate(codes.items()):
        path = folder / rank.replace("_", "-")
        path.write_text(code)
        os.utime(path, (1e9 + at, 1e9 + at))


def test_only_the_last_try_counts(tmp_path: Path) -> None:
    run_dir = make(tmp_path / "run", step=5)
    begin = "stage.sbatch: job 12, start 0, try {}: 2 ranks on n[1-2], master n1:1"
    write_log(run_dir, begin.format(0), "0: error: old", begin.format(1), "0: error: new")
    write_exits(run_dir, rank_1="137\n", rank_0="75\n", rank_2="rubbish\n")
    lines = [{"try": 0, "end": "crashed"}, {"try": 1, "end": "at fault", "nodes": "n[1-2]"}]
    (run_dir / "submit" / "tries.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"end": "ha')
    found = evidence_of(run_dir, NO_SLURM)
    assert [(line.number, line.text) for line in found.log][1:] == [(4, "0: error: new")]
    assert [(one.rank, one.code) for one in found.exits] == [(1, 137), (0, 75)]
    assert (found.last_try, found.try_number) == (lines[1], 2)
    assert (found.log_name, found.has_slurm) == ("submit/x-12.out", False)


def test_a_line_of_a_long_log_keeps_its_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jobs.monitor.evidence._LOG_BYTES", 64)
    monkeypatch.setattr("jobs.reports.facts._CHUNK", 7)
    run_dir = make(tmp_path / "run", step=5)
    write_log(run_dir, *(f"line {number}" for number in range(1, 101)))
    found = evidence_of(run_dir, NO_SLURM)
    assert found.log[-1].text == f"line {found.log[-1].number}" == "line 100"


def test_what_is_no_evidence(tmp_path: Path) -> None:
    run_dir = make(tmp_path / "run", step=5)
    (run_dir / "submit" / "tries.jsonl").mkdir(parents=True)
    os.mkfifo(run_dir / "submit" / "x-1.out")
    (run_dir / "heartbeats").mkdir()
    (run_dir / "heartbeats" / "rank-00000.json").write_text("[")
    found = evidence_of(run_dir, NO_SLURM)
    assert (found.log, found.exits, found.beats, found.last_try, found.stacks) == ((), (), (), None, ())
    with pytest.raises(UserError, match="there is no folder"):
        evidence_of(tmp_path / "nothing", NO_SLURM)
