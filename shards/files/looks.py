"""Finds out whether files exist, on storage that may fail.

While a file server restarts, even the check whether a file exists may fail, with ESTALE or EIO.
`Path.exists` raises such an error, which would end a run. The functions here distinguish three answers: there, missing
and unknown. `is_there`, `is_a_file` and `is_a_folder` look again until they know; `look_once` returns at once;
`RepeatedLook` is for a file that is looked for at every step.
"""

import errno
import logging
import os
import stat
import time
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import TypeVar

from shards.storage.local import read_again
from shards.storage.objects import Traffic
from shards.storage.retries import ALARM_SECONDS

log = logging.getLogger(__name__)
_MISSING = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
Result = TypeVar("Result")


class Look(Enum):
    """Whether a path exists. UNKNOWN: the check failed, so the file may or may not exist."""

    THERE = "there"
    MISSING = "missing"
    UNKNOWN = "unknown"


def look_once(path: Path) -> Look:
    """Checks whether a path exists, following links, and returns at once. Never raises OSError."""
    try:
        return Look.THERE if _status(path) else Look.MISSING
    except OSError:
        return Look.UNKNOWN


def patiently(path: Path, read: Callable[[], Result]) -> Result:
    """Returns what `read()`, which looks at `path` or reads it, returns. Calls it again while the storage fails, for up
    to two minutes, and then raises its OSError. Logs a warning after a minute."""
    return read_again(str(path), read, traffic=Traffic(), stop=None)


def is_there(path: Path) -> bool:
    """Returns whether there is anything at this path, following links. Waits as `patiently` does."""
    return patiently(path, lambda: _status(path)) is not None


def is_a_file(path: Path) -> bool:
    """Returns whether there is a regular file at this path. Waits as `patiently` does."""
    found = patiently(path, lambda: _status(path))
    return found is not None and stat.S_ISREG(found.st_mode)


def is_a_folder(path: Path) -> bool:
    """Returns whether there is a folder at this path. Waits as `patiently` does."""
    found = patiently(path, lambda: _status(path))
    return found is not None and stat.S_ISDIR(found.st_mode)


class RepeatedLook:
    """Checks for the same file again and again, without waiting. After a failed check, the last answer is kept. If
    checks have failed for a minute, logs a warning, once until the storage answers again.

    `todo`: what a person can do in the meantime, for the warning. If the file is a link, the link itself counts, not
    its target.
    """

    def __init__(self, path: Path, *, todo: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._todo, self._clock = path, todo, clock
        self._last: os.stat_result | None = None
        self._failing_since: float | None = None
        self._has_warned = False

    def status(self) -> os.stat_result | None:
        """Returns the file's status; None if it is missing. Never raises OSError."""
        try:
            self._last = _status(self._path, follows=False)
        except OSError as error:
            self._failed(error)
            return self._last
        if self._has_warned:
            log.warning("%s can be looked for again", self._path)
        self._failing_since, self._has_warned = None, False
        return self._last

    def _failed(self, error: OSError) -> None:
        now = self._clock()
        since = self._failing_since = now if self._failing_since is None else self._failing_since
        if now - since >= ALARM_SECONDS and not self._has_warned:
            self._has_warned = True
            said = "%s cannot be looked for (%s) for %.0f s now, so nobody knows whether it is there; %s"
            log.warning(said, self._path, error.strerror, now - since, self._todo)


def _status(path: Path, *, follows: bool = True) -> os.stat_result | None:
    """Returns the status of what is at this path; None if nothing is there. Raises OSError if that cannot be found
    out."""
    try:
        return path.stat(follow_symlinks=follows)
    except OSError as error:
        if error.errno in _MISSING:
            return None
        raise
    except ValueError:  # a name with a NUL, which nothing can have
        return None
