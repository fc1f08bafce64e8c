"""Every error has its exit code, which scripts and sites know, and its words; only a bug comes with a traceback."""

import errno
import re
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest

from jobs import exit_codes
from jobs.exit_codes import Interrupted, end_of
from shards.errors import StorageError, TransientError, UnreachableError, UserError, WillNotSucceedError
from shards.storage.s3_client import BadAnswerError

CHECKOUT = Path(__file__).resolve().parents[2]
CONTINUES = "run the same command to continue"


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


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE])
def test_a_disks_fault_is_no_mistake_whoever_met_it(number: int) -> None:
    """A message that a rank ended with 2 for it would end a chain."""
    mistake = UserError("cannot write 'a': it fails; give another --out")
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
    codes = {name: value for name, value in vars(exit_codes).items() if name.isupper()}
    assert codes == {
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
