"""What Ctrl-C, TERM, USR1 and USR2 do to commands other than training."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jobs import exit_codes
from jobs.exit_codes import AnsweredInExchanges, Interrupted, Interrupts, exit_code_of
from tests.rigs.datasets import packed_folders
from tests.rigs.interrupting import behind_a_proxy, started
from tests.rigs.screens import Screen

CHECKOUT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGUSR1", 138)])
@pytest.mark.parametrize(
    ("loaded", "said"),
    [
        pytest.param("", "interrupted", id="while it loads"),
        pytest.param(
            "interrupts.works(); interrupts.interrupt = Interrupted(signal.SIGINT);", "ended at once", id="the second"
        ),
    ],
)
def test_it_ends_at_once(name: str, code: int, loaded: str, said: str) -> None:
    """In code that Python cannot unwind, such as an import, or if the command has not ended after the first signal."""
    program = (
        "import os, signal\n"
        "from jobs.exit_codes import Interrupted, Interrupts\n"
        f"with Interrupts() as interrupts: {loaded} os.kill(os.getpid(), signal.{name})\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=CHECKOUT)
    assert done.returncode == code
    (line,) = done.stderr.splitlines()
    assert line[9:] == said  # after the time of day


def test_while_it_works_it_is_raised() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Interrupts() as interrupts:
        interrupts.works()
        with pytest.raises(KeyboardInterrupt) as raised:
            os.kill(os.getpid(), signal.SIGTERM)
    assert exit_code_of(raised.value) == 143
    assert signal.getsignal(signal.SIGTERM) == before
    assert [exit_code_of(KeyboardInterrupt()), exit_code_of(Interrupted(signal.SIGINT))] == [130, 130]


def test_an_interrupt_that_a_finalizer_swallows_ends_the_command(tmp_path: Path) -> None:
    """Python prints and drops what is raised in a finalizer; the command fails later for want of what ended there."""
    program = (
        "import os, signal, sys\n"
        "from jobs import cli\n"
        "from shards.errors import UserError\n"
        "class Final:\n"
        "    def __del__(self): os.kill(os.getpid(), signal.SIGINT)\n"
        "def run(argv, interrupts):\n"
        "    interrupts.works()\n"
        "    Final()\n"
        "    raise UserError('the server is gone')\n"
        "cli._run = run\n"
        "sys.exit(cli.main([]))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=CHECKOUT)
    assert done.returncode == 130
    assert "the server is gone" not in done.stderr


STUCK = (
    "import ctypes, sys, threading\n"
    "from jobs import interrupts\n"
    "interrupts.DEADLINE_SECONDS = float(sys.argv[1])\n"
    "lock, library, gate = ctypes.create_string_buffer(64), ctypes.CDLL(None), threading.Lock()\n"
    "def say():\n"
    "    with gate: print('stuck', flush=True)\n"
    "with interrupts.Interrupts() as own, interrupts.AnsweredInExchanges():\n"
    "    own.works()\n"
    "    library.pthread_mutex_lock(lock)\n"
    "    gate.acquire()\n"
    "    threading.Thread(target=say, daemon=True).start()\n"
    "    sys.setswitchinterval(1000)\n"  # the thread runs once the main thread has left Python
    "    gate.release()\n"
    "    library.pthread_mutex_lock(lock)\n"  # for ever, and no signal interrupts it
)


def test_a_signal_ends_what_waits_outside_python_after_the_deadline() -> None:
    with subprocess.Popen([sys.executable, "-c", STUCK, "0.5"], stdout=subprocess.PIPE, cwd=CHECKOUT) as process:
        assert process.stdout
        assert process.stdout.readline() == b"stuck\n"
        process.terminate()
        try:
            assert process.wait(120) == 143
        finally:
            process.kill()


def test_a_second_signal_ends_what_waits_outside_python_at_once() -> None:
    with subprocess.Popen([sys.executable, "-c", STUCK, "600"], stdout=subprocess.PIPE, cwd=CHECKOUT) as process:
        assert process.stdout
        assert process.stdout.readline() == b"stuck\n"
        # The kernel merges equal signals that wait, and may deliver different ones in any order.
        give_up = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < give_up:
            process.send_signal(signal.SIGINT)
            time.sleep(0.1)
        try:
            assert process.returncode == 130
        finally:
            process.kill()


def test_afterwards_signals_are_as_before() -> None:
    with Interrupts() as interrupts:
        interrupts.works()
        with pytest.raises(KeyboardInterrupt), AnsweredInExchanges():
            os.kill(os.getpid(), signal.SIGTERM)
    assert signal.set_wakeup_fd(-1) == -1


def test_nothing_is_glued_to_the_echo_of_a_key() -> None:
    program = (
        "import os, signal, sys\n"
        "from jobs.exit_codes import Interrupts\n"
        "with Interrupts() as interrupts:\n"
        "    interrupts.works()\n"
        "    os.write(2, b'^C')\n"
        "    try:\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "    except KeyboardInterrupt:\n"
        "        os.write(2, b'interrupted\\n')\n"
    )
    screen = Screen(80)
    subprocess.run([sys.executable, "-c", program], stderr=screen.inside, check=True, cwd=CHECKOUT)
    lines = screen.read()
    screen.close()
    assert lines == ["interrupted", ""]


@pytest.mark.slow
@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGINT, marks=pytest.mark.long),
        signal.SIGTERM,
        pytest.param(signal.SIGUSR2, marks=pytest.mark.long),
    ],
)
def test_packing_keeps_what_is_whole_and_goes_on(tmp_path: Path, number: signal.Signals) -> None:
    words = ("pack", "digits", "--out", str(tmp_path / "out"), "--samples-per-shard", "30", "--workers", "2")
    with started(tmp_path / "said", *words) as command:
        command.wait_until(lambda: any((tmp_path / "out" / "index").glob("*.parquet")))
        command.signal(number)
        assert command.end() == exit_codes.CONTINUE
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "index").glob("*.parquet")}
    assert f"stopped; what is packed so far stays in {tmp_path / 'out'}; run the same command to" in command.said
    assert "Traceback" not in command.said
    with started(tmp_path / "again", *words) as command:
        assert command.end() == exit_codes.DONE
    assert kept
    assert {path: path.stat().st_mtime_ns for path in kept} == kept


def test_what_saves_nothing_says_so(tmp_path: Path, s3_bucket: str) -> None:
    """While a read hangs."""
    dataset = packed_folders(tmp_path)
    with behind_a_proxy(str(dataset), s3_bucket) as (url, proxy):
        proxy.rates = {"silence": 1.0}
        with started(tmp_path / "said", "verify", url, environ={"AWS_ENDPOINT_URL": proxy.endpoint}) as command:
            command.wait_until(proxy.stalling.is_set)
            command.signal(signal.SIGINT)
            assert command.end() == exit_codes.INTERRUPTED
    assert command.said == "interrupted; run the same command to start again\n"
