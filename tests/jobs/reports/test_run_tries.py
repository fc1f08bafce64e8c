"""The words for every end of a try that stage.sbatch puts on record."""

import json
from pathlib import Path

import pytest

from jobs.reports.facts import is_newest, last_try, said_of_last_try, try_words
from tests.jobs.reports.test_ls import make
from tests.rigs.processes import patchline


@pytest.mark.parametrize(
    ("end", "codes", "words"),
    [
        (
            "crashed",
            [74, 75],
            "ended by a fault outside the program: storage, a disk, a lost worker or rank (exit code 74), and",
        ),
        ("crashed", [1, 137], "ended by SIGKILL (exit code 1 and 137), and is to be continued"),
        ("crashed", [70], "ended by a bug in patchline (exit code 70), and is to be continued"),
        ("crashed", [9], "crashed (exit code 9), and is to be continued"),
        ("crashed", [], "crashed (no rank left an exit code), and is to be continued"),
        ("crashed", "nonsense", "crashed (no rank left an exit code), and is to be continued"),
        ("crashed", [75], "crashed (exit code 75), and is to be continued"),
        ("stopped", [75], "saved and stopped, and is to be continued"),
        ("something new", [], "ended as: something new"),
    ],
)
def test_words(end: str, codes: object, words: str) -> None:
    assert try_words({"end": end, "exit_codes": codes}).startswith(words)


def test_the_last_line_and_whether_a_try_has_begun_since(tmp_path: Path) -> None:
    assert last_try(tmp_path) == (None, 0)
    folder = tmp_path / "submit"
    folder.mkdir()
    lines = [{"job": 9, "start": 0, "try": 1, "end": "crashed"}, {"job": 10, "start": 0, "try": 0, "end": "stopped"}]
    (folder / "tries.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + "{half")
    line, number = last_try(tmp_path)
    assert (line, number) == (lines[1], 2)
    assert line
    assert is_newest(tmp_path, line)
    for name in ("exits-9-0-1", "exits-10-0-0"):
        (folder / name).mkdir()
    assert is_newest(tmp_path, line)
    (folder / "exits-10-1-0").mkdir()
    assert not is_newest(tmp_path, line)
    (folder / "exits-2-0-0").mkdir()
    (folder / "exits-2-0-0" / "started").touch()
    assert is_newest(tmp_path, {"job": 2, "start": 0, "try": 0}), "Slurm may count again"


def test_the_report_says_how_the_last_try_ended(tmp_path: Path) -> None:
    run_dir = make(tmp_path / "run", step=100)
    (run_dir / "submit").mkdir()
    line = {"job": 9, "start": 0, "try": 1, "exit_codes": [74], "end": "crashed"}
    (run_dir / "submit" / "tries.jsonl").write_text(json.dumps(line) + "\n")
    shown = patchline("report", str(run_dir)).output
    ended = "its last try ended by a fault outside the program: storage, a disk, a lost worker or rank (exit code 74)"
    assert " ".join(shown.split("\n", 1)[1].split()).startswith(ended), "it is part of the outcome"
    assert ended in (run_dir / "report.html").read_text()
    (run_dir / "submit" / "tries.jsonl").write_text(json.dumps(line | {"end": "gave up"}) + "\n")
    assert said_of_last_try(run_dir) == ""


def test_the_node_that_crashed_alone_is_named() -> None:
    line = {"end": "crashed", "exit_codes": [74, 139], "crashed_on": "n2"}
    assert "(exit code 74 and 139) on n2 alone, and is to be continued" in try_words(line)
    assert "alone" not in try_words(line | {"crashed_on": 7})


@pytest.mark.parametrize(
    ("left_out", "words"),
    [
        ("n2,n3", "found too few healthy nodes, and is to be continued; left out: n2,n3"),
        ("", "found too few healthy nodes, and is to be continued"),
        (7, "found too few healthy nodes, and is to be continued"),
        ("n\x1b2", r"found too few healthy nodes, and is to be continued; left out: n\x1b2"),
    ],
)
def test_the_nodes_that_a_try_left_out_are_named(left_out: object, words: str) -> None:
    assert try_words({"end": "too few nodes", "exit_codes": [], "left_out": left_out}) == words
    crashed = try_words({"end": "crashed", "exit_codes": [9], "left_out": left_out})
    assert crashed == "crashed (exit code 9), and is to be continued" + words.partition("continued")[2]


def test_status_names_the_nodes_that_were_left_out(tmp_path: Path) -> None:
    run_dir = make(tmp_path / "run", step=100)
    (run_dir / "submit").mkdir()
    line = {"job": 9, "start": 0, "try": 0, "left_out": "n2", "exit_codes": [], "end": "too few nodes"}
    (run_dir / "submit" / "tries.jsonl").write_text(json.dumps(line) + "\n")
    for command in ("status", "doctor"):
        assert "too few healthy nodes, and is to be continued; left out: n2" in " ".join(
            patchline(command, str(run_dir)).output.split()
        )
