"""The files that a source does not read: archives, which may hold images, with a warning, others as a number."""

import logging
import re
from collections import Counter

from shards.output.quantities import plural
from shards.sources.entry import IMAGE_SUFFIXES, printable

log = logging.getLogger(__name__)
_ARCHIVE = re.compile(r"\.(?:zip|rar|7z|tar|tgz|tbz2|txz|tar\.\w+)$", re.IGNORECASE)
_LONGEST_SUFFIX = 8


class PassedOver:
    """Counts the files that a source passes over, by suffix. `why`: what they lack, such as "with no image suffix"."""

    def __init__(self, *, why: str) -> None:
        self._why = why
        self._others, self._held = Counter[str](), Counter[str]()
        self._examples: dict[str, str] = {}

    def add(self, name: str) -> None:
        """Counts a file by its name. Archives, and images where none are read, are named."""
        suffix = _suffix(name)
        if is_archive(name) or suffix.lower() in IMAGE_SUFFIXES:
            self._held[suffix] += 1
            self._examples.setdefault(suffix, printable(name))
        else:
            self._others[suffix] += 1

    def mention(self, root: str) -> None:
        """Logs what was passed over below `root`."""
        for suffix, count in sorted(self._held.items()):
            message = "%s: passed over %s %s, such as %s; no image in them is packed; repack them if they belong to it"
            log.warning(message, printable(root), plural(count, f"{suffix} file"), self._why, self._examples[suffix])
        if self._others:
            kinds = ", ".join(f"{count} {suffix}" for suffix, count in sorted(self._others.most_common(5)))
            files = plural(self._others.total(), "file")
            log.info("%s: skipped %s %s: %s", printable(root), files, self._why, kinds)


def is_archive(name: str) -> bool:
    """Whether a file is named like an archive, compressed or not."""
    return _ARCHIVE.search(name) is not None


def _suffix(name: str) -> str:
    """A file name from its last dot, as a kind of file."""
    _, dot, suffix = name.rpartition("/")[2].rpartition(".")
    return f".{printable(suffix)}" if dot and len(suffix) < _LONGEST_SUFFIX else "without a suffix"
