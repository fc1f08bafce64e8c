"""The end of a file of JSON lines, read without the rest: the metrics of 300,000 steps are 200 MB."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shards.files.json_lines import Line, object_in
from shards.local_file import open_local_file


@dataclass(frozen=True, kw_only=True)
class Tail:
    """The last bytes of a file that has `num_bytes`, last changed at `modified` (seconds since 1970)."""

    data: bytes
    num_bytes: int
    modified: float

    def last(self, is_usable: Callable[[Line], bool], *, containing: bytes = b"") -> Line | None:
        """The last usable line, of those with `containing` in them, which has no line break. None if there is none; a
        line that begins before these bytes does not count."""
        end = len(self.data)
        while end > 0:
            if containing:
                end = self._end_of_line(self.data.rfind(containing, 0, end), most=end)
            first = self.data.rfind(b"\n", 0, max(0, end)) + 1
            if end < 0 or (first == 0 and len(self.data) < self.num_bytes):
                return None
            text = self.data[first:end]
            if text and (found := object_in(text)) is not None and is_usable(found):
                return found
            end = first - 1
        return None

    def _end_of_line(self, position: int, *, most: int) -> int:
        """Of the line with a position, up to `most`; -1 for none."""
        if position < 0:
            return -1
        end = self.data.find(b"\n", position, most)
        return most if end < 0 else end


def read_tail(path: Path, *, most_bytes: int) -> Tail | None:
    """The last `most_bytes` of a file, or all of it; None if it is missing.

    Raises OSError if it is a folder or unreadable, and InvalidDataError if it is not a regular file.
    """
    try:
        file = open_local_file(path)
    except FileNotFoundError:
        return None
    with file:
        status = os.fstat(file.fileno())
        file.seek(max(0, status.st_size - most_bytes))
        return Tail(data=file.read(most_bytes), num_bytes=status.st_size, modified=status.st_mtime)
