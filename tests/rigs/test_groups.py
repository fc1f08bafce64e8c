"""Tests that run beside each other, and one that runs alone, in two workers of pytest-xdist."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rigs.groups import group_of, spread

CHECKOUT = Path(__file__).resolve().parents[2]
INNER = """
import json, os, time
from pathlib import Path
import pytest

@pytest.fixture(autouse=True)
def _times(request):
    began = time.time()
    yield
    line = json.dumps([request.node.name, os.environ["PYTEST_XDIST_WORKER"], began, time.time()])
    with Path("{out}").open("a") as file:
        file.write(line + "\\n")

{marks}
@pytest.mark.parametrize("number", range({count}))
def test_{name}(number):
    time.sleep({seconds})
"""


def test_groups() -> None:
    assert group_of("tests/slurm/test_x.py::test_y[a]") == "tests/slurm/test_x.py"
    assert group_of("tests/shards/test_x.py::test_y[ceph]") == "ceph"
    assert group_of("tests/shards/test_x.py::test_y[s3]") == "tests/shards/test_x.py"


def test_one_runs_alone_and_long_ones_begin(tmp_path: Path) -> None:
    files = {
        "a": ("", 6, 0.7),
        "d": ("", 6, 0.3),
        "b": ("@pytest.mark.alone", 2, 0.6),
        "c": ("@pytest.mark.slow", 1, 1.5),
    }
    for name, (marks, count, seconds) in files.items():
        text = INNER.format(marks=marks, count=count, seconds=seconds, name=name, out=tmp_path / "times")
        (tmp_path / f"test_{name}.py").write_text(text)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow\n    alone\n")
    options = ["-p", "tests.rigs.groups", "-p", "no:cacheprovider", "-n", "2", "--dist", "loadfile"]
    command = [sys.executable, "-m", "pytest", *options, "--rootdir", str(tmp_path), str(tmp_path)]
    environ = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(CHECKOUT)}
    done = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert "15 passed" in done.stdout, done.stdout + done.stderr
    times = [json.loads(line) for line in (tmp_path / "times").read_text().splitlines()]
    workers = {(name[5], worker) for name, worker, _, _ in times}
    assert len(workers) == 4, "a file's tests stay in one worker"
    first = {name: min(began for other, _, began, _ in times if other[5] == name) for name in files}
    assert sorted(files, key=first.__getitem__)[:2] in (["b", "c"], ["c", "b"]), times
    for name, _, began, ended in times:
        beside = [other for other, _, start, end in times if other != name and start < ended and began < end]
        assert name[5] != "b" or beside == [], f"{name} ran beside {beside}"
    assert any(a[2] < c[3] and c[2] < a[3] for a in times for c in times if (a[0][5], c[0][5]) == ("a", "d"))


def test_a_marked_test_without_the_word_in_its_id_is_refused(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("import pytest\n@pytest.mark.rgw\ndef test_it():\n    pass\n")
    command = [sys.executable, "-m", "pytest", "-p", "tests.rigs.groups", "-p", "no:cacheprovider", str(tmp_path)]
    environ = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(CHECKOUT)}
    done = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert "is marked rgw, and its id must have ceph in it" in done.stdout + done.stderr
    assert done.returncode == pytest.ExitCode.USAGE_ERROR


def test_groups_of_slurm_stand_between_the_others() -> None:
    assert spread("ab", "01234567") == list("012a345b67")
    assert spread("abcd", "01234567") == list("012a345b67cd")
    assert spread("", "0123") == list("0123")
