"""What a run of tests says last and records, and how the long part is divided."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rigs.long_parts import divided, part_from
from tests.rigs.outcome import MOST_LINES, MOST_WIDTH, first_line, last_lines

CHECKOUT = Path(__file__).resolve().parents[2]
INNER = {
    "test_a.py": """
import pytest

def test_passes():
    pass

def test_fails():
    assert 1 == 2, "one is not two"

@pytest.mark.skip(reason="no such program")
def test_is_skipped():
    pass
""",
    "test_b.py": """
import pytest

@pytest.fixture
def broken():
    raise OSError("the disk is full")

def test_has_a_broken_fixture(broken):
    pass
""",
    "test_c.py": "import no_such_module",
}
PLUGINS = ("tests.rigs.groups", "tests.rigs.long_parts", "tests.rigs.outcome")


def run_inner(folder: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    """Runs pytest in two workers on the files of `INNER`."""
    for name, text in INNER.items():
        (folder / name).write_text(text)
    plugins = [word for name in PLUGINS for word in ("-p", name)]
    words = ["-m", "pytest", *plugins, "-p", "no:cacheprovider", "-n", "2", "--dist", "loadfile", "--durations=5"]
    command = [sys.executable, *words, "--rootdir", str(folder), *options, str(folder)]
    environ = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(CHECKOUT)}
    return subprocess.run(command, env=environ, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


def test_failures_come_last_and_are_recorded(tmp_path: Path) -> None:
    done = run_inner(tmp_path, "--outcome", str(tmp_path / "outcome.json"))
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    *said, summary = done.stdout.splitlines()[-8:]
    assert "what failed: 3" in said[0]
    failed = dict(zip(said[1::2], said[2::2], strict=True))
    assert failed.keys() == {"test_a.py::test_fails", "test_b.py::test_has_a_broken_fixture", "test_c.py"}
    assert failed["test_a.py::test_fails"] == "    AssertionError: one is not two"
    assert failed["test_b.py::test_has_a_broken_fixture"] == "    in its setup: OSError: the disk is full"
    assert "1 passed, 1 skipped" in summary
    record = json.loads((tmp_path / "outcome.json").read_text())
    assert record["passed"] == 1
    assert [one["test"] for one in record["skipped"]] == ["test_a.py::test_is_skipped"]
    assert [one["reason"] for one in record["skipped"]] == ["no such program"]
    assert {one["test"]: "    " + one["error"] for one in record["failed"]} == failed
    assert record["seconds"] >= 0
    assert {"commit", "cpu", "cores", "kinds"} <= record.keys()


@pytest.mark.long
def test_parts_join_in_one_record(tmp_path: Path) -> None:
    """Each test runs in one of the parts, and the parts of another division are dropped. The seconds, by which later
    parts are divided, change with the last part."""
    path, timed = tmp_path / "outcome.json", []
    for part in ("1/1", "1/2", "2/2"):
        run_inner(tmp_path, "--outcome", str(path), "--part", part, "--ignore", "test_c.py")
        timed.append(sorted(json.loads(path.read_text())["seconds"]))
    assert timed == [["test_a.py", "test_b.py"], [], ["test_a.py", "test_b.py"]]
    whole = json.loads(path.read_text())
    assert list(whole["parts"]) == ["1/2", "2/2"]
    assert sum(part["passed"] for part in whole["parts"].values()) == 1
    assert sorted(one["test"] for part in whole["parts"].values() for one in part["failed"]) == [
        "test_a.py::test_fails",
        "test_b.py::test_has_a_broken_fixture",
    ]


def report_of(said: str, when: str) -> pytest.TestReport:
    """A failed test."""
    return pytest.TestReport("test_a.py", ("test_a.py", None, "test_a.py"), {}, "failed", said, when)  # type: ignore[arg-type]


def test_a_worker_that_crashed_has_no_phase() -> None:
    said = "worker 'gw0' crashed while running 'test_a.py::test_it'"
    assert first_line(report_of(said, "???")) == said


@pytest.mark.parametrize(
    ("said", "line"),
    [
        ("\n  \n the first \nthe second", "the first"),
        ("2 faults:\na.py:3: imports b\na.py:4: imports c", "2 faults: a.py:3: imports b"),
        ("nothing follows:", "nothing follows:"),
        ("", "no message"),
    ],
)
def test_the_first_line_says_something(said: str, line: str) -> None:
    assert first_line(report_of(said, "call")) == line


@pytest.mark.parametrize("num_failed", [0, 1, 15, 16, 30, 31, 1000])
def test_the_last_lines_are_few_and_short(num_failed: int) -> None:
    lines = list(last_lines([(f"test_{number}", "why " * 1000) for number in range(num_failed)]))
    assert len(lines) <= MOST_LINES
    assert all(len(line) <= MOST_WIDTH for line in lines)
    named = [line for line in lines if line.startswith("test_")]
    assert len(named) == num_failed or lines[-1] == f"and {num_failed - len(named)} more"


@pytest.mark.parametrize("text", ["0/6", "7/6", "3", "3/", "/6", "-1/6", "a/b", "1/0", "1/6/7", " 1/6"])
def test_a_part_that_does_not_exist_is_refused(text: str) -> None:
    with pytest.raises(pytest.UsageError, match="allowed: I/N"):
        part_from(text)


def test_parts_are_whole_and_balanced() -> None:
    seconds = {"a": 100.0, "b": 60.0, "c": 50.0, "d": 1.0}
    parts = divided(["d", "c", "b", "a", "new"], 2, seconds)
    assert parts == [{"a", "new"}, {"b", "c", "d"}]
    assert divided([], 2, seconds) == [set(), set()]
