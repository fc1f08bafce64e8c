"""Walks through folders end, whatever links lead where."""

import logging
import os
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from shards.errors import UserError
from shards.output.terminal import printable_name

log = logging.getLogger(__name__)

MOST_DEPTH = 100  # of folders inside each other
MOST_WAYS = 16  # by which links may lead to one folder: several may share it, as classes share images

Identity = tuple[int, int]  # device and inode


class FolderWalk:
    """The folders that a walk is inside of, and how often links have led it to the same one.

    Without the second, 40 folders with two links each to the next would be a trillion.
    """

    def __init__(self) -> None:
        self._inside: list[Identity] = []
        self._num_links = 0  # among the folders inside which the walk is
        self._ways: Counter[Identity] = Counter()

    @contextmanager
    def inside(self, folder: bytes) -> Iterator[bool]:
        """While the walk is inside `folder`; False if it must be left out, which is logged.

        UserError if folders are nested deeper than MOST_DEPTH. OSError if there is no such folder.
        """
        if len(self._inside) > MOST_DEPTH:
            what = f"{_shown(folder)} is nested more than {MOST_DEPTH} folders deep"
            raise UserError(f"{what}; allowed: {MOST_DEPTH}; move it up, or remove the link that leads there")
        status = os.lstat(folder.rstrip(b"/") or b"/")
        if is_link := stat.S_ISLNK(status.st_mode):
            status = os.stat(folder)  # noqa: PTH116 - names are bytes, since they need not be UTF-8
        identity = status.st_dev, status.st_ino
        if reason := self._refusal(identity, is_below_link=is_link or self._num_links > 0):
            log.warning("%s %s; it is not followed", _shown(folder), reason)
            yield False
            return
        self._inside.append(identity)
        self._num_links += is_link
        try:
            yield True
        finally:
            self._inside.pop()
            self._num_links -= is_link

    def _refusal(self, identity: Identity, *, is_below_link: bool) -> str:
        if identity in self._inside:
            return "leads back to a folder that contains it"
        if not is_below_link:
            return ""
        self._ways[identity] += 1
        is_too_often = self._ways[identity] > MOST_WAYS
        return f"is a folder to which links have led {MOST_WAYS} times already" if is_too_often else ""


def _shown(folder: bytes) -> str:
    return printable_name(os.fsdecode(folder))
