"""Folders that workers share: made once, whoever comes first, fails or is killed; and what changed in one."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.rigs.made_once import MadeOnce
from tests.rigs.training import flags_in

CHECKOUT = Path(__file__).resolve().parents[2]
WORKER = """
import sys, time
from pathlib import Path
from tests.rigs.made_once import MadeOnce

def make(folder):
    with open(sys.argv[2], "a") as file:
        file.write("made\\n")
    time.sleep(float(sys.argv[3]))
    (folder / "file").write_text("whole")

print("begins", flush=True)
folder = MadeOnce(Path(sys.argv[1])).folder("it", make)
print((folder / "file").read_text(), folder)
"""


def worker(root: Path, *, seconds: float) -> "subprocess.Popen[str]":
    """A process that says that it begins, and then what is in the folder and where that is."""
    command = [sys.executable, "-c", WORKER, str(root), str(root.parent / "makings"), str(seconds)]
    environ = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)


def refused(_: Path) -> None:
    raise AssertionError("made again")


def test_workers_at_once_get_one_folder(tmp_path: Path) -> None:
    workers = [worker(tmp_path / "root", seconds=1.0) for _ in range(3)]
    said = {one.communicate(timeout=60)[0] for one in workers}
    assert len(said) == 1
    assert said.pop().startswith("begins\nwhole ")
    assert (tmp_path / "makings").read_text() == "made\n"


def test_a_worker_that_is_killed_is_replaced(tmp_path: Path) -> None:
    killed = worker(tmp_path / "root", seconds=600.0)
    pause, deadline = threading.Event(), time.monotonic() + 60
    while not (tmp_path / "makings").exists() or not (tmp_path / "makings").read_text():
        assert killed.poll() is None
        assert time.monotonic() < deadline
        pause.wait(0.01)
    other = worker(tmp_path / "root", seconds=0.0)
    assert other.stdout is not None
    assert other.stdout.readline() == "begins\n"
    killed.kill()
    killed.communicate(timeout=60)
    assert other.communicate(timeout=60)[0].startswith("whole ")
    assert (tmp_path / "makings").read_text() == "made\nmade\n"


def test_a_failure_is_raised_and_not_kept(tmp_path: Path) -> None:
    made = MadeOnce(tmp_path)
    with pytest.raises(AssertionError, match="made again"):
        made.folder("it", refused)
    folder = made.folder("it", lambda folder: (folder / "file").touch())
    assert made.folder("it", refused) == folder
    assert made.folder("other", lambda folder: (folder / "file").touch()) != folder


def test_changes_are_named(tmp_path: Path) -> None:
    def make(folder: Path) -> None:
        (folder / "deep").mkdir()
        for name in ("kept", "written", "removed"):
            (folder / "deep" / name).write_text(name)

    made = MadeOnce(tmp_path)
    deep = made.folder("it", make) / "deep"
    assert made.changed() == []
    (deep / "written").write_text("WRITTEN")
    (deep / "removed").unlink()
    (deep / "added").symlink_to(tmp_path)
    assert made.changed() == [str(deep / name) for name in ("added", "removed", "written")]


def test_the_same_run_has_the_same_flags_in_any_words() -> None:
    options = ("--engine.zero-stage", "1", "--ema-decay", "0.9", "--data.mix", "a", "3", "b", "1")
    same = ("--data.mix", "a", "3", "b", "1", "--ema-decay", "0.9")
    assert flags_in(options) == flags_in(same) == [["--data.mix", "a", "3", "b", "1"], ["--ema-decay", "0.9"]]
    assert flags_in(("--engine.zero-stage", "2")) == [["--engine.zero-stage", "2"]]
