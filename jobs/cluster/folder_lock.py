"""Lets one process at a time work in a folder that several hosts may share.

flock(2) is tried first, since the kernel releases it even if the process is killed. Some file systems refuse it (Lustre
without -o flock, some NFS servers). There, the lock is a folder, because mkdir succeeds for one process only. A file in
the folder names the owner, and the owner renews the folder's time. An owner counts as dead if its process has ended on
this host, or if it has not renewed the time for STALE_SECONDS by the file server's clock. The next process then removes
the lock.
"""

import errno
import fcntl
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TextIO

from shards.errors import TransientError

PATIENCE_SECONDS, STALE_SECONDS = 300.0, 60.0
_PAUSE_SECONDS, _RENEWAL_SECONDS = 0.1, 10.0
_WITHOUT_FLOCK = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
_FOLDER, _BOOT = "lock.owned", Path("/proc/sys/kernel/random/boot_id")


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Lets one process at a time work in the folder: on this host, and on other hosts if the file system shares locks.
    Raises TransientError if another process holds the lock for too long."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    with (folder / "lock").open("w") as file:
        while (is_held := _flocked(file)) is False:
            _wait(folder, deadline)
        with nullcontext() if is_held else _owning(folder, deadline):
            yield


def has_flock(folder: Path) -> bool:
    """Whether the folder's file system supports flock. Raises OSError if nothing can be written there."""
    path = folder / f".flock-{secrets.token_hex(4)}"
    try:
        with path.open("w") as file:
            return _flocked(file) is not None
    finally:
        path.unlink(missing_ok=True)


def _flocked(file: TextIO) -> bool | None:
    """Takes the file's lock if it is free, and returns whether this process holds it. Returns None if the file system
    does not support flock."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _WITHOUT_FLOCK:
            raise
        return None
    return True


@contextmanager
def _owning(folder: Path, deadline: float) -> Iterator[None]:
    lock, owner = folder / _FOLDER, f"{_this_host()}-{os.getpid()}-{secrets.token_hex(4)}"
    while True:
        try:
            lock.mkdir()
            break
        except FileExistsError:
            _remove_if_dead(lock)
            _wait(folder, deadline)
    (lock / owner).touch()
    has_ended = threading.Event()
    renewal = threading.Thread(target=_renew, args=(lock, has_ended), name="lock-renewal", daemon=True)
    renewal.start()
    try:
        yield
    finally:
        has_ended.set()
        renewal.join()
        with suppress(OSError):  # another process considered this one dead, and removed its lock
            (lock / owner).unlink()
            lock.rmdir()


def _renew(lock: Path, has_ended: threading.Event) -> None:
    while not has_ended.wait(_RENEWAL_SECONDS):
        with suppress(OSError):
            os.utime(lock)


def _remove_if_dead(lock: Path) -> None:
    """Removes the lock of a dead owner. If several processes try this, only the one that removes the owner's file goes
    on to remove the folder."""
    try:
        owner = next((path.name for path in lock.iterdir()), "")
        host, _, rest = owner.rpartition("-")[0].rpartition("-")
        is_gone = host == _this_host() and rest.isdecimal() and not Path(f"/proc/{rest}").exists()
        if is_gone or _age(lock) > STALE_SECONDS:
            if owner:
                (lock / owner).unlink()
            lock.rmdir()
    except OSError:
        pass  # another process was faster


def _this_host() -> str:
    """Returns a name of this host that includes its boot id, because two hosts may have the same host name."""
    return f"{socket.gethostname()}.{_BOOT.read_text()[:8] if _BOOT.is_file() else ''}"


def _age(lock: Path) -> float:
    """Returns the seconds since the lock was last renewed, by the file server's clock."""
    probe = lock.parent / f".{_FOLDER}-{secrets.token_hex(4)}"
    probe.touch()
    try:
        return probe.stat().st_mtime - lock.stat().st_mtime
    finally:
        probe.unlink()


def _wait(folder: Path, deadline: float) -> None:
    if time.monotonic() > deadline:
        raise TransientError(
            f"another patchline has been at work in {folder} for {PATIENCE_SECONDS:.0f} s; try again later"
        )
    time.sleep(_PAUSE_SECONDS)
