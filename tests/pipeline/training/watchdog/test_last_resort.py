"""A rank in which a library holds the interpreter lock is ended from outside, with its stacks, by the clock of the
process that ends it."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from pipeline.training.watchdog import last_resort
from pipeline.training.watchdog.last_resort import LastResort

UNFED = """
import sys, threading
from pipeline.training.watchdog.last_resort import LastResort

last_resort = LastResort(seconds=float(sys.argv[1]), stderr=2)
print("started", flush=True)
threading.Event().wait(120)
"""
HOLDING = """
import ctypes, sys, threading
from pipeline.training.watchdog.last_resort import LastResort

def hold_the_lock():
    while True:  # a signal ends a sleep
        ctypes.PyDLL(None).sleep(60)

last_resort = LastResort(seconds=3.0, stderr=2)
for _ in range(40):
    threading.Event().wait(0.1)
    last_resort.feed()
sys.stderr.write("fed for 4 s\\n")
hold_the_lock()
"""


def test_a_thread_that_waits_for_a_disk_is_seen(tmp_path: Path) -> None:
    """A process that starts another one sleeps like that until the other has opened its files: here, a pipe."""
    os.mkfifo(tmp_path / "pipe")
    opens = f"[(os.POSIX_SPAWN_OPEN, 0, {str(tmp_path / 'pipe')!r}, os.O_RDONLY, 0)]"
    starts = f"import os; os.posix_spawn('/bin/true', ['true'], os.environ, file_actions={opens})"
    deadline, pause = time.monotonic() + 60, threading.Event()
    assert not last_resort.waits_for_disk(os.getpid())
    with subprocess.Popen([sys.executable, "-c", starts]) as process:
        while not last_resort.waits_for_disk(process.pid):
            assert time.monotonic() < deadline
            pause.wait(0.02)
        (tmp_path / "pipe").open("w").close()


def test_a_call_that_waits_for_a_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening a pipe waits for its other end, like FUSE: in process state S."""
    monkeypatch.chdir(tmp_path)
    for name in ("by path", "in a folder", "relative"):
        os.mkfifo(name)
    folder = os.open(tmp_path, os.O_RDONLY)
    opens = (
        lambda: os.open(tmp_path / "by path", os.O_RDONLY),
        lambda: os.open("in a folder", os.O_RDONLY, dir_fd=folder),
        lambda: os.open("relative", os.O_RDONLY),
    )
    threads = [threading.Thread(target=one) for one in opens]
    for thread in threads:
        thread.start()
    expected = {f"openat of {tmp_path / name}" for name in ("by path", "in a folder", "relative")}
    deadline, pause = time.monotonic() + 60, threading.Event()
    while not expected <= set(last_resort.file_calls().values()):
        assert time.monotonic() < deadline, last_resort.file_calls()
        pause.wait(0.02)
    before = last_resort.file_calls()
    assert {key: last_resort.file_calls().get(key) for key in before} == before, "as long as they wait"
    for name in ("by path", "in a folder", "relative"):
        os.open(name, os.O_WRONLY)
    for thread in threads:
        thread.join()
    assert not expected & set(last_resort.file_calls().values())


def test_what_was_known_last_is_said_of_a_rank_that_runs_no_more_python(tmp_path: Path) -> None:
    said, program = tmp_path / "said", HOLDING.replace("feed()", 'feed("the disk of /data does not answer")')
    with said.open("wb") as errors:
        subprocess.run([sys.executable, "-c", program], stderr=errors, check=False, timeout=120)
    assert "waits: the disk of /data does not answer\n" in said.read_text()


def test_a_rank_that_holds_the_interpreter_lock_is_ended(tmp_path: Path) -> None:
    said = tmp_path / "said"
    with said.open("wb") as errors:
        done = subprocess.run([sys.executable, "-c", HOLDING], stderr=errors, check=False, timeout=120)
    assert done.returncode == -signal.SIGKILL
    text = said.read_text()
    assert text.startswith("fed for 4 s\n"), "while it is fed, nothing happens"
    assert "has run no Python for 3 s and is ended; its stacks:" in text
    assert "in hold_the_lock" in text


def test_its_process_needs_the_standard_library_only() -> None:
    program = (
        f"import runpy, sys; runpy.run_path({last_resort.__file__!r}); "
        "assert not {'torch', 'pipeline', 'shards'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-I", "-S", "-c", program], check=True)


def test_a_rank_without_a_beat_is_killed() -> None:
    done = subprocess.run([sys.executable, "-c", UNFED, "0.5"], check=False, timeout=120)
    assert done.returncode == -signal.SIGKILL


def test_time_in_which_the_rank_is_stopped_does_not_count() -> None:
    rank = subprocess.Popen([sys.executable, "-c", UNFED, "2"], stdout=subprocess.PIPE)
    assert rank.stdout
    assert rank.stdout.readline() == b"started\n"
    os.kill(rank.pid, signal.SIGSTOP)
    assert not threading.Event().wait(5)
    assert rank.poll() is None
    os.kill(rank.pid, signal.SIGKILL)
    rank.wait()
    rank.stdout.close()


def test_closing_it_ends_its_process() -> None:
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    found = LastResort(seconds=60, stderr=2)
    found.feed()
    pid = found._process.pid
    found.close()
    assert not Path(f"/proc/{pid}").exists()
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors


def test_one_that_cannot_be_started_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "missing"))
    with pytest.raises(FileNotFoundError):
        LastResort(seconds=60, stderr=2)
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors


def test_it_does_not_outlive_a_rank_that_is_killed(tmp_path: Path) -> None:
    program = (
        "import threading\n"
        "from pipeline.training.watchdog.last_resort import LastResort\n"
        "last_resort = LastResort(seconds=60, stderr=2)\n"
        "print(last_resort._process.pid, flush=True)\n"
        "threading.Event().wait(60)\n"
    )
    rank = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert rank.stdout
    pid = int(rank.stdout.readline())
    rank.kill()
    rank.wait()
    rank.stdout.close()
    deadline, pause = time.monotonic() + 60, threading.Event()
    while _is_alive(pid) and time.monotonic() < deadline:
        pause.wait(0.02)
    assert not _is_alive(pid)


def _is_alive(pid: int) -> bool:
    path = Path(f"/proc/{pid}/stat")
    return path.exists() and path.read_text().rpartition(")")[2].split()[0] != "Z"
