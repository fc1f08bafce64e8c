"""How commands end: the exit codes, and what errors and signals do to a command."""

import errno
import os
import re
import resource
import signal
import subprocess
import sys
import time
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest

from jobs import exit_codes
from jobs.exit_codes import Interrupted, Interrupts, answered_in_exchanges, end_of, exit_code_of
from pipeline.training.watchdog import stopping
from shards.errors import StorageError, TransientError, UnreachableError, UserError, WillNotSucceedError
from shards.storage.s3_client import BadAnswerError
from tests.rigs.datasets import packed_folders
from tests.rigs.interrupting import behind_a_proxy, started
from tests.rigs.screens import Screen

CHECKOUT = Path(__file__).resolve().parents[2]
CONTINUES = "run the same command to continue"
STUCK = (
    "import ctypes, sys, threading\n"
    "from jobs import exit_codes\n"
    "exit_codes.DEADLINE_SECONDS = float(sys.argv[1])\n"
    "lock, library, gate = ctypes.create_string_buffer(64), ctypes.CDLL(None), threading.Lock()\n"
    "def say():\n"
    "    with gate: print('stuck', flush=True)\n"
    "with exit_codes.Interrupts() as own, exit_codes.answered_in_exchanges():\n"
    "    own.works()\n"
    "    library.pthread_mutex_lock(lock)\n"
    "    gate.acquire()\n"
    "    threading.Thread(target=say, daemon=True).start()\n"
    "    sys.setswitchinterval(1000)\n"  # the thread runs once the main thread has left Python
    "    gate.release()\n"
    "    library.pthread_mutex_lock(lock)\n"  # for ever, and no signal interrupts it
)


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (UserError("--out is missing"), exit_codes.USER_MISTAKE, "error: --out is missing"),
        (UnreachableError("nobody answers"), exit_codes.USER_MISTAKE, "error: nobody answers"),
        (TransientError("a peer is away"), exit_codes.CRASH, f"error: a peer is away; {CONTINUES}"),
        (StorageError("no answer"), exit_codes.CRASH, f"error: no answer; {CONTINUES}"),
        (BadAnswerError("failed: 503"), exit_codes.CRASH, f"error: failed: 503; {CONTINUES}"),
        (WillNotSucceedError("it diverged"), exit_codes.WILL_NOT_SUCCEED, "error: it diverged"),
        (KeyboardInterrupt(), exit_codes.INTERRUPTED, "interrupted; run the same command to start again"),
        (Interrupted(15), 143, "interrupted; run the same command to start again"),
        (
            BrokenProcessPool("a child died"),
            exit_codes.CRASH,
            f"error: a worker process was killed (a child died); did memory run out? R{CONTINUES[1:]}, "
            "with fewer --workers",
        ),
    ],
)
def test_a_known_kind_is_said_in_one_line(error: BaseException, code: int, message: str) -> None:
    end = end_of(error)
    assert (end.code, end.message, end.has_traceback) == (code, message, False)


@pytest.mark.parametrize(
    ("number", "said", "todo"),
    [
        (errno.ENOSPC, "No space left on device", "make room, and"),
        (errno.EDQUOT, "Disk quota exceeded", "make room, and"),
        (errno.ENOMEM, "Cannot allocate memory", "free some memory, and"),
        (errno.EROFS, "Read-only file system", "make it writable, and"),
        (errno.EACCES, "Permission denied", "give this user access, and"),
        (errno.EIO, "Input/output error", "check the disk or the file server;"),
        (errno.EMFILE, "Too many open files", "raise the limit on open files (ulimit -n), and"),
    ],
)
def test_a_fault_of_the_system_is_one_line_too(number: int, said: str, todo: str) -> None:
    end = end_of(OSError(number, said, "/data/x"))
    assert end.message == f"error: {said} at /data/x; {todo} {CONTINUES}"
    assert (end.code, end.has_traceback) == (exit_codes.CRASH, False)
    assert end_of(OSError(number, said)).message == f"error: {said}; {todo} {CONTINUES}"


def test_a_limit_of_the_shell_is_said_with_its_remedy() -> None:
    """No retry helps, whoever set the limit."""
    limits = {kind: resource.getrlimit(kind) for kind in (resource.RLIMIT_FSIZE, resource.RLIMIT_AS)}
    mistake = UserError("cannot write job.yaml: File too large", todo="give another --run-dir")
    mistake.__cause__ = OSError(errno.EFBIG, "File too large", "job.yaml")
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[resource.RLIMIT_FSIZE][1]))
        resource.setrlimit(resource.RLIMIT_AS, (1 << 44, limits[resource.RLIMIT_AS][1]))
        ends = [end_of(OSError(errno.EFBIG, "File too large", "/data/x")), end_of(mistake), end_of(MemoryError("no"))]
    finally:
        for kind, limit in limits.items():
            resource.setrlimit(kind, limit)
    size = "this process may write files of at most 100.0 kB (ulimit -f); raise that limit (ulimit -f unlimited)"
    memory = "this process may have 17592.2 GB of addresses (ulimit -v); raise that limit (ulimit -v unlimited)"
    assert [(end.code, end.message, end.has_traceback) for end in ends] == [
        (exit_codes.WILL_NOT_SUCCEED, f"error: File too large at /data/x; {size}", False),
        (exit_codes.USER_MISTAKE, f"error: cannot write job.yaml: File too large; {size}", False),
        (exit_codes.USER_MISTAKE, f"error: no; {memory}, and run the same command again", False),
    ]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE])
def test_a_disks_fault_is_no_mistake_whoever_met_it(number: int) -> None:
    """A message that a rank ended with 2 for it would end a chain."""
    mistake = UserError("cannot write 'a': it fails", todo="give another --out")
    mistake.__cause__ = OSError(number, "it fails", "a")
    end = end_of(mistake)
    assert end.message.startswith("error: cannot write 'a': it fails; ")
    assert end.message.endswith(CONTINUES)
    assert (end.code, end.has_traceback) == (exit_codes.CRASH, False)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.ELOOP, "Too many links", "a"), "Too many links at a; remove the link that leads back to itself"),
        (OSError(errno.ENAMETOOLONG, "Name too long", "b\n"), "Name too long at b\\n; use shorter names"),
        (OSError(errno.EISDIR, "Is a folder", "c.part", None, "c"), "Is a folder at c; move it away, or give another"),
        (OSError(errno.ENOTDIR, "Not a folder", b"d"), "Not a folder at d; move it away, or give another path"),
    ],
)
def test_a_path_that_cannot_be_used_is_a_mistake(error: OSError, said: str) -> None:
    end = end_of(error)
    assert end.message.startswith(f"error: {said}")
    assert (end.code, end.has_traceback) == (exit_codes.USER_MISTAKE, False)


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (KeyError("x"), exit_codes.OUR_BUG, "this is a bug in patchline"),
        (AssertionError(), exit_codes.OUR_BUG, "this is a bug in patchline"),
        (NotADirectoryError(errno.ENOTDIR, "Not a directory"), exit_codes.CRASH, "a system call failed; " + CONTINUES),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), exit_codes.CRASH, "a system call failed; " + CONTINUES),
        (RuntimeError("odd"), exit_codes.CRASH, "ended by an unexpected error; " + CONTINUES),
    ],
)
def test_what_nobody_foresaw_is_shown_whole(error: Exception, code: int, message: str) -> None:
    end = end_of(error)
    assert end.message.startswith(message)
    assert (end.code, end.has_traceback) == (code, True)


def test_a_reader_that_has_seen_enough_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jobs.exit_codes.has_no_reader", lambda _stream: True)
    end = end_of(BrokenPipeError(errno.EPIPE, "Broken pipe"))
    assert (end.code, end.message) == (141, "")


def test_the_numbers_are_the_documented_ones() -> None:
    codes = {name: value for name, value in vars(exit_codes).items() if name.isupper() and isinstance(value, int)}
    assert {name: value for name, value in codes.items() if not name.startswith("_")} == {
        "DONE": 0,
        "FAULTS_FOUND": 1,
        "USER_MISTAKE": 2,
        "OUR_BUG": 70,
        "CRASH": 74,
        "CONTINUE": 75,
        "WILL_NOT_SUCCEED": 78,
        "INTERRUPTED": 130,
    }


def test_the_batch_script_has_the_same_numbers() -> None:
    script = (CHECKOUT / "slurm" / "stage.sbatch").read_text()
    found = dict(re.findall(r"\b(USER_ERROR|CONTINUE|HOPELESS)=(\d+)", script))
    assert found == {"USER_ERROR": "2", "CONTINUE": "75", "HOPELESS": "78"}


def test_the_page_of_exit_codes_lists_them() -> None:
    page = (CHECKOUT / "docs" / "troubleshooting.md").read_text()
    rows = re.findall(r"^\| (\d+(?:, \d+)*) \|", page, flags=re.MULTILINE)
    listed = {int(code) for row in rows for code in row.split(", ")}
    assert listed == {0, 1, 2, 70, 74, 75, 78, 130, 138, 140, 141, 143}


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


def test_a_run_ends_with_the_codes_of_commands() -> None:
    """The pipeline's room is below, and cannot import them."""
    of_commands = (exit_codes.CONTINUE, exit_codes.CRASH, exit_codes.INTERRUPTED)
    assert of_commands == (stopping.CONTINUE, stopping.NOTHING_SAVED, stopping.INTERRUPTED)


def test_afterwards_signals_are_as_before() -> None:
    with Interrupts() as interrupts:
        interrupts.works()
        with pytest.raises(KeyboardInterrupt), answered_in_exchanges():
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
