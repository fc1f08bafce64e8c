"""What is said about a machine, from what was read of it."""

import errno
import os
import resource
from pathlib import Path

import pytest

from pipeline.machine import checks
from pipeline.training.zero.loading import TESTED
from shards.errors import Finding

GB = 10**9


@pytest.mark.parametrize(
    ("found", "bounds", "is_right"),
    [
        ("2.13.0+cu130", "<2.14,>=2.11", True),
        ("2.14.0", "<2.14,>=2.11", False),
        ("2.9.1", "<2.14,>=2.11", False),
        ("2.11", ">=2.11", True),
        ("0.13.4", "==0.13.*", True),
        ("0.14", "==0.13.*", False),
        ("7", "", True),
    ],
)
def test_bounds_of_versions(found: str, bounds: str, is_right: bool) -> None:
    assert checks.fits(found, bounds) == is_right


@pytest.mark.parametrize(
    ("check", "status", "found", "todo"),
    [
        pytest.param(checks.judge_python((3, 11, 7)), "ok", "3.11.7", "", id="Python"),
        pytest.param(checks.judge_python((3, 10, 1)), "fault", "3.10.1", "install Python 3.11", id="an old Python"),
        pytest.param(checks.judge_python((3, 15, 0)), "fault", "3.15.0", "install Python 3.11", id="a new Python"),
        pytest.param(
            checks.judge_versions([("torch", "<2.14", "2.14.1"), ("numpy", ">=2", "")]),
            "fault",
            "torch 2.14.1, needed: <2.14; numpy is missing, needed: >=2",
            "constraints.txt",
            id="wrong libraries",
        ),
        pytest.param(checks.judge_deepspeed(TESTED[-1]), "ok", "which is tested", "", id="DeepSpeed"),
        pytest.param(checks.judge_deepspeed("9.9"), "fault", "9.9; tested", "--engine.allow-deepspeed 9.9", id="9.9"),
        pytest.param(checks.judge_deepspeed(""), "fault", "missing; tested", "pip install deepspeed==", id="none"),
        pytest.param(checks.judge_cores(64, "max 100000\n"), "ok", "64", "", id="no limit"),
        pytest.param(checks.judge_cores(64, "400000 100000"), "warning", "may use 4", "--threads 4", id="a limit"),
        pytest.param(
            checks.judge_cores(192, "12800000 100000"), "warning", "may use 128", "--threads 128", id="a large limit"
        ),
        pytest.param(checks.judge_cores(2, "400000 100000"), "ok", "2", "", id="a limit above the cores"),
        pytest.param(checks.judge_cores(2, "a 0"), "ok", "2", "", id="not a limit"),
        pytest.param(checks.judge_cores(2, "1 0"), "ok", "2", "", id="not a period"),
        pytest.param(checks.judge_memory(8 * GB), "ok", "8.0 GB are free", "", id="memory"),
        pytest.param(checks.judge_memory(GB), "warning", "1.0 GB are free", "raise the container", id="little memory"),
        pytest.param(checks.judge_memory(1 << 62), "warning", "not known", "/proc", id="unknown memory"),
        pytest.param(checks.judge_shared(64 << 20), "warning", "67.1 MB", "--shm-size", id="a container's default"),
        pytest.param(checks.judge_shared(None), "warning", "there is no /dev/shm", "--shm-size", id="none there"),
        pytest.param(checks.judge_shared(8 * GB), "ok", "8.0 GB", "", id="shared memory"),
        pytest.param(checks.judge_files(1024, 1 << 20), "warning", "1,024", "ulimit -n 4096", id="few files"),
        pytest.param(checks.judge_files(256, 256), "warning", "256", "administrator", id="few files for good"),
        pytest.param(checks.judge_files(resource.RLIM_INFINITY, -1), "ok", "no limit", "", id="all files"),
        pytest.param(checks.judge_disk("/x", GB, ""), "warning", "1.0 GB are free", "make room", id="a full disk"),
        pytest.param(checks.judge_disk("/x", GB, "Read-only"), "fault", "Read-only", "--folder", id="not writable"),
    ],
)
def test_judgements(check: Finding, status: str, found: str, todo: str) -> None:
    assert check.status == status
    assert found in check.found
    assert todo in check.todo
    assert bool(check.todo) == (status != "ok"), "whatever is not right says what to do"


def test_the_checks_of_this_machine() -> None:
    found = checks.local_checks()
    assert len({one.name for one in found}) == len(found)
    libraries = next(one for one in found if one.name == "libraries")
    assert (libraries.status, "torch" in libraries.found) == ("ok", True)


def test_a_folder_that_is_not_there_yet_is_on_the_disk_above(tmp_path: Path) -> None:
    before = list(tmp_path.iterdir())
    check = checks.folder_check(tmp_path / "runs" / "one")
    assert check.found.endswith(f"are free in {tmp_path}")
    assert list(tmp_path.iterdir()) == before


def test_a_folder_that_cannot_be_written_to() -> None:
    check = checks.folder_check(Path("/proc"))
    assert (check.status, os.strerror(errno.ENOENT) in check.found) == ("fault", True)
