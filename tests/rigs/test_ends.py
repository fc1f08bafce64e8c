"""When a test times out, nothing that it started survives, whatever it was waiting for. Processes that tests share
survive."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.rigs.own_processes import is_alive

CHECKOUT = Path(__file__).resolve().parents[2]
SLEEPS = "import os, pathlib, sys, time; pathlib.Path(str(os.getpid())).touch(); time.sleep(1000)"
# Each is the body of a test with a limit of a few seconds. `sleeper` is a command that prints its pid and sleeps.
WAITS = {
    "for a command": "subprocess.run(sleeper)",
    "for the child of a command": "subprocess.run(['sh', '-c', f'{shlex.join(sleeper)} & wait'])",
    "while an orphan in a session of its own sleeps": (
        "subprocess.run(['setsid', '--fork', 'sh', '-c', f'{shlex.join(sleeper)} &']); time.sleep(1000)"
    ),
    "for forked ranks, whose pool waits for them": (
        "with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context('forkserver')) as pool:\n"
        "        pool.submit(exec, sleeper[2]).result()"
    ),
}
INNER = """
import multiprocessing, pathlib, shlex, subprocess, sys, time
from concurrent.futures import ProcessPoolExecutor
import pytest
from tests.rigs.own_processes import is_alive

sleeper = [sys.executable, "-c", {sleeps!r}]

@pytest.fixture(scope="module")
def server():
    words = ["sh", "-c", "sleep 1000 & echo $!; read line; kill $!"]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    yield process.pid, int(process.stdout.readline())
    process.communicate()

@pytest.mark.timeout({seconds})
def test_waits(server):
    {body}

def test_the_server_and_its_child_live_alone(server):
    assert [path.name for path in pathlib.Path().glob("[0-9]*") if is_alive(int(path.name))] == []
    assert [is_alive(pid) for pid in server] == [True, True]
"""


@pytest.mark.parametrize("waits", WAITS)
def test_a_test_whose_time_runs_out_ends_every_process_that_it_started(waits: str, tmp_path: Path) -> None:
    (tmp_path / "test_inner.py").write_text(INNER.format(sleeps=SLEEPS, seconds=5, body=WAITS[waits]))
    options = ["-p", "tests.rigs.ends", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", str(tmp_path)]
    command = [sys.executable, "-m", "pytest", *options, str(tmp_path / "test_inner.py")]
    environ = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(CHECKOUT)}
    done = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "Failed: Timeout" in done.stdout
    pids = [int(path.name) for path in tmp_path.glob("[0-9]*")]
    assert pids
    assert [pid for pid in pids if is_alive(pid)] == []
