"""When the process beside a rank ends it, by its own clock; whole ranks are in test_last_resort.py."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from pipeline.training.watchdog import last_resort_process

STARTS_IT = (
    "import subprocess, sys, threading\n"
    "words = [sys.executable, '-I', '-S', sys.argv[1], str(__import__('os').getpid()), sys.argv[2], '0']\n"
    "subprocess.Popen(words, stdin=subprocess.PIPE)\n"
    "print('started', flush=True)\n"
    "threading.Event().wait(120)\n"
)
FILE = str(Path(last_resort_process.__file__))


def test_it_needs_the_standard_library_only() -> None:
    program = (
        f"import runpy, sys; runpy.run_path({FILE!r}); assert not {{'torch', 'pipeline', 'shards'}} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-I", "-S", "-c", program], check=True)


def test_a_rank_without_a_beat_is_killed() -> None:
    done = subprocess.run([sys.executable, "-c", STARTS_IT, FILE, "0.5"], check=False, timeout=120)
    assert done.returncode == -signal.SIGKILL


def test_time_in_which_the_rank_is_stopped_does_not_count() -> None:
    rank = subprocess.Popen([sys.executable, "-c", STARTS_IT, FILE, "2"], stdout=subprocess.PIPE)
    assert rank.stdout
    assert rank.stdout.readline() == b"started\n"
    os.kill(rank.pid, signal.SIGSTOP)
    assert not threading.Event().wait(5)
    assert rank.poll() is None
    os.kill(rank.pid, signal.SIGKILL)
    rank.wait()
    rank.stdout.close()
