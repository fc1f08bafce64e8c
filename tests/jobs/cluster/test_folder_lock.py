"""One process at a time works in a folder, with flock and where the kernel says that the file system has none."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jobs.cluster import folder_lock
from jobs.cluster.folder_lock import alone, has_flock
from shards.errors import TransientError

# Each of three adds 1 to a number twenty times, with time between reading and writing.
COUNT = """
import sys, time
from pathlib import Path
from jobs.cluster.folder_lock import alone
folder = Path(sys.argv[1])
for _ in range(20):
    with alone(folder):
        number = int((folder / "number").read_text())
        time.sleep(0.002)
        (folder / "number").write_text(str(number + 1))
"""
HOLD = """
import signal, sys
from pathlib import Path
from jobs.cluster.folder_lock import alone
with alone(Path(sys.argv[1])):
    (Path(sys.argv[1]) / "held").touch()
    signal.pause()
"""


def without_flock(program: str, folder: Path, error: str) -> list[str]:
    """Returns the command of a process whose flock fails with this error, which strace injects."""
    if shutil.which("strace") is None:
        pytest.skip("needs strace")
    trace = ["strace", "--follow-forks", "--output=/dev/null", "--trace=flock", f"--inject=flock:error={error}"]
    return [*trace, sys.executable, "-c", program, str(folder)]


@pytest.mark.parametrize("error", ["ENOSYS", "ENOLCK", "EOPNOTSUPP"])
def test_one_at_a_time_where_there_is_no_flock(tmp_path: Path, error: str) -> None:
    (tmp_path / "number").write_text("0")
    processes = [subprocess.Popen(without_flock(COUNT, tmp_path, error)) for _ in range(3)]
    assert [process.wait(120) for process in processes] == [0, 0, 0]
    assert (tmp_path / "number").read_text() == "60"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock", "number"]


def test_the_lock_of_a_process_that_was_killed_is_removed(tmp_path: Path) -> None:
    (tmp_path / "number").write_text("0")
    holder = subprocess.Popen(without_flock(HOLD, tmp_path, "ENOLCK"), start_new_session=True)
    deadline = time.monotonic() + 60
    while not (tmp_path / "held").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(holder.pid, 9)
    holder.wait(60)
    assert len(list((tmp_path / "lock.owned").iterdir())) == 1
    subprocess.run(without_flock(COUNT, tmp_path, "ENOLCK"), check=True, timeout=60)
    assert (tmp_path / "number").read_text() == "20"


def test_the_lock_of_another_host_is_removed_once_nobody_renews_it(tmp_path: Path) -> None:
    lock = tmp_path / "lock.owned"
    lock.mkdir()
    (lock / "gone.12345678-1-0123abcd").touch()
    (tmp_path / "number").write_text("0")
    with pytest.raises(TransientError), folder_lock._owning(tmp_path, time.monotonic()):
        pass
    assert list(lock.iterdir()), "it may be alive there"
    os.utime(lock, (time.time() - 120, time.time() - 120))
    subprocess.run(without_flock(COUNT, tmp_path, "ENOLCK"), check=True, timeout=60)
    assert not lock.exists()
    assert (tmp_path / "number").read_text() == "20"


def test_a_process_that_does_not_end_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_lock, "PATIENCE_SECONDS", 0.1)
    too_long = pytest.raises(TransientError, match="another patchline has been at work in")
    with alone(tmp_path), too_long, alone(tmp_path):
        pass
    with alone(tmp_path):
        pass
    assert has_flock(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock"]
