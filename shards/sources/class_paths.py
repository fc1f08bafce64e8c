"""Which folder of an image's path is its class, and what is said if it could be another one."""

import logging
from typing import Literal

from shards.class_names import class_name
from shards.output.quantities import plural
from shards.sources.entry import printable

log = logging.getLogger(__name__)

ClassLevel = Literal["auto", "first", "deepest", "path"]
_FLAG = "--source.class-level"
_MOST_WARNINGS = 10


class ClassPaths:
    """Names the classes of a collection by their folders, and remembers what could be meant otherwise.

    `auto` takes the first folder, as `first` does, and warns if images lie in folders further down.
    """

    def __init__(self, level: ClassLevel) -> None:
        self._level = level
        self._named: dict[str, str] = {}
        self._holds: dict[str, str] = {}
        self._nested: dict[str, tuple[str, str]] = {}
        self._num_merged = 0

    def class_of(self, folders: str, *, num_first: int = 1) -> str:
        """The class of the images in a folder, such as `a/airfield`. The first `num_first` names are the first level,
        whose last one is the class; warns if two folders get one name."""
        parts = folders.split("/")
        own = "/".join(parts[:num_first])
        where = own if self._level in ("auto", "first") else folders
        name = class_name(printable(where if self._level == "path" else where.rpartition("/")[2]))
        if (other := self._named.setdefault(name, where)) != where:
            self._named[name] = where
            self._mention_merged(other, where)
        if self._level == "auto" and (held := self._holds.setdefault(name, folders)) != folders:
            self._nested.setdefault(name, (held, folders))
        return name

    def mention_nested(self, *, root: str) -> None:
        """Warns if classes have images in several folders, which could be the classes."""
        if not self._nested:
            return
        name, (one, other) = next(iter(self._nested.items()))
        log.warning(
            "%s: %s with images in two folders or more, such as %s with %s and %s; they stay one class each; if the "
            "sub-folders are the classes, give %s deepest, or path for their whole path; to keep it so: %s first",
            root,
            plural(len(self._nested), "class"),
            ascii(name),
            ascii(printable(one)),
            ascii(printable(other)),
            _FLAG,
            _FLAG,
        )

    def _mention_merged(self, one: str, other: str) -> None:
        self._num_merged += 1
        if self._num_merged > _MOST_WARNINGS:
            return
        if one.rpartition("/")[2] == other.rpartition("/")[2]:
            message = f"the folders %s and %s are one class; {_FLAG} path keeps them apart"
        else:
            message = "the folders %s and %s are one class: they differ only in spaces or in their Unicode form"
        log.warning(message, ascii(one), ascii(other))
