"""Derives an image's class and split from the names of folders and files, and counts the files that are not read.

Folders and files named like splits are refused, because the splits would become classes or be mixed in one dataset. A
warning names the archives among the files that are not read, because they may hold images.
"""

import logging
import re
import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from shards.class_names import class_name
from shards.config_values import shown_value
from shards.errors import UserError
from shards.output.quantities import plural
from shards.sources.entry import IMAGE_SUFFIXES, Entry, printable

_SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev", "eval"), "validation"),
    **dict.fromkeys(("test", "testing"), "test"),
}
# Published datasets (STL-10, SVHN) have folders with these names beside train and test. Alone, each may be a class
# name.
_BESIDE_SPLITS = frozenset(("unlabeled", "unlabelled", "extra", "holdout", "hold-out", "held-out"))
SPLIT_COLUMN = "split"
_NUMBERED_SPLITS = frozenset(("0", "1", "2", "True", "False"))  # 0, 1 and 2 in Waterbirds, CelebA and Camelyon
_MOST_SHOWN = 6
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")  # finds Train in mnistTrain, too
log = logging.getLogger(__name__)
ClassLevel = Literal["auto", "first", "deepest", "path"]
_FLAG = "--source.class-level"
_MOST_WARNINGS = 10
_ARCHIVE = re.compile(r"\.(?:zip|rar|7z|tar|tgz|tbz2|txz|tar\.\w+)$", re.IGNORECASE)
_LONGEST_SUFFIX = 8


def split_of(name: str) -> str:
    """Returns the split that a folder or file of this name holds: train, validation or test. Returns "" for any other
    name."""
    return _SPLITS.get(name.casefold(), "")


def split_in(name: str) -> str:
    """Returns the split that a name mentions, as test-00000.parquet does, or "" if it mentions none or several."""
    splits = set(filter(None, (split_of(word[0]) for word in _WORD.finditer(name))))
    return splits.pop() if len(splits) == 1 else ""


def refuse_split_classes(root: str, classes: Collection[str], *, nested: Collection[str]) -> None:
    """Raises UserError if the class folders below `root` are splits according to `splits_among`. `nested`: the class
    folders that contain folders, which are then the real classes."""
    found = splits_among(classes)
    if not found:
        return
    commands = []
    for name, split in names_for(found).items():
        folder = shlex.quote(f"{root.rstrip('/')}/{name}")
        recipe = "folder" if name in nested else "flat"
        own = shlex.quote(split)
        commands.append(f"  patchline pack {recipe} --source.root {folder} --split {own} --out DATA/{own}")
    what = f"--source.root {root!r} holds {', '.join(map(repr, found))}, which are names of splits, not of classes"
    raise UserError("\n".join([f"{what}; pack each as a dataset of its own:", *commands]))


def splits_among(names: Collection[str]) -> dict[str, str]:
    """Returns the names that differ only in the name of a split, such as train2017 and val2017, with the split of each.

    If there are none, but every name is that of a split or one that usually stands beside splits, returns all names.
    Class names such as `test tube` and `train station` are not splits.
    """
    groups: dict[str, dict[str, str]] = {}
    for name in sorted(names):
        for word in _WORD.finditer(name):
            if split := split_of(word[0]):
                rest = f"{name[: word.start()]}*{name[word.end() :]}".casefold()
                groups.setdefault(rest, {})[name] = split
    found = {name: split for group in groups.values() if len(set(group.values())) > 1 for name, split in group.items()}
    beside = {name: name.casefold() for name in names if name.casefold() in _BESIDE_SPLITS}
    exact = {name: split_of(name) for name in sorted(names) if split_of(name)}
    are_all = bool(exact) and len(exact) + len(beside) == len(names)
    return found or (exact | beside if are_all else {})


def names_for(found: Mapping[str, str]) -> dict[str, str]:
    """Returns a dataset name for each folder: its split or, if two folders have the same split, such as dev and eval,
    the folder's own name."""
    counts = Counter(found.values())
    return {name: split if counts[split] == 1 else name for name, split in found.items()}


def refuse_classes_of_splits(classes: Collection[str]) -> None:
    """Raises UserError for class names, from any source, that differ only in the name of a split."""
    if found := splits_among(classes):
        splits = ", ".join(f"{name!r} ({split})" for name, split in list(found.items())[:_MOST_SHOWN])
        raise UserError(
            f"the classes {splits} are names of splits, not of classes; pack the images of each split as a dataset of "
            "its own, with --split and only its part of the source"
        )


def refuse_several(found: Mapping[str, str], *, what: str, todo: str) -> None:
    """Raises UserError if images belong to more than one split. `found`: each split, and where it was found."""
    if len(found) > 1:
        examples = ", ".join(f"{split} ({where})" for split, where in found.items())
        raise UserError(f"{what} of the splits {examples}, which would become one dataset; {todo}")


def refusing_mixed_folders(entries: Iterable[Entry], root: str, *, option: str = "--source.root") -> Iterator[Entry]:
    """Yields the entries of a source. Raises UserError at the end if they lie in folders of different splits, which
    would become one dataset."""
    found: dict[str, str] = {}
    last = ""
    for entry in entries:
        folder = entry.name.rpartition("/")[0]
        if folder != last:
            last = folder
            for split in filter(None, map(split_of, folder.split("/"))):
                found.setdefault(split, entry.name)
        yield entry
    todo = "give the folder of one split and --split, or list the images of each with patchline pack manifest"
    refuse_several(found, what=f"below {option} {root!r} lie images", todo=todo)


class Splits:
    """The splits of a table's rows. `wanted`: the split that is packed; if it is empty, the table must have only one
    split."""

    def __init__(self, *, wanted: str) -> None:
        self._wanted, self._is_found = _split_named(wanted), False
        self._seen: dict[str, str] = {}

    def has(self, cell: Any, path: str, number: int) -> bool:
        """Returns whether a row is packed. Raises UserError if `wanted` is empty and the row belongs to a second
        split."""
        if cell is None and not self._wanted:
            return True
        text = cell.decode("utf-8", "replace") if isinstance(cell, bytes) else "" if cell is None else cell
        name = _split_named(text)
        seen = name if self._wanted else split_value(text)
        if (self._wanted or seen) and seen not in self._seen and len(self._seen) < _MOST_SHOWN:
            self._seen[seen] = f"{printable(path.rpartition('/')[2])} row {number}"
        if not self._wanted:
            todo = "pack each with patchline pack manifest --source.split-column split --split NAME"
            refuse_several(self._seen, what=f"column {SPLIT_COLUMN!r} has rows", todo=todo)
        self._is_found = self._is_found or name == self._wanted
        return not self._wanted or name == self._wanted

    def refuse_none(self, column: str) -> None:
        """Raises UserError if no row belonged to the wanted split."""
        if not self._is_found and self._wanted:
            found = ", ".join(map(shown_value, self._seen)) or "no rows"
            raise UserError(f"column {column!r} has no row of the split {self._wanted!r}, but {found}; set --split")


def split_value(cell: object) -> str:
    """Returns the split that a cell of a column `split` means: train, validation or test if it mentions one, as
    PublicTest and id_train do, or a number or truth value by which some datasets number their splits. Returns "" for
    any other cell."""
    text = str(cell).strip()
    return split_in(text) or (text if text in _NUMBERED_SPLITS else "")


def _split_named(value: object) -> str:
    """Returns train, validation or test for any name of these splits, and any other name unchanged."""
    name = str(value).strip()
    return split_of(name) or name


def files_of_splits(paths: Sequence[str]) -> dict[str, list[str]]:
    """Returns the files of each split, according to the words in their paths below their common folder. A name with
    several splits, such as train_val.csv, belongs to none."""
    shared = [path.split("/")[:-1] for path in paths]
    num_shared = 0
    while all(len(parts) > num_shared and parts[num_shared] == shared[0][num_shared] for parts in shared):
        num_shared += 1
    found: dict[str, list[str]] = {}
    for path in paths:
        own = "/".join(path.split("/")[num_shared:])
        if split := split_in(own):
            found.setdefault(split, []).append(path)
    return found


def refuse_mixed_splits(paths: Sequence[str]) -> None:
    """Raises UserError if the files belong to different splits."""
    found, example = dict[str, str](), ""
    for split, files in files_of_splits(paths).items():
        found[split] = plural(len(files), "file")
        example = example or f"--source.files {shlex.quote(files[0])}{' ...' if len(files) > 1 else ''} --split {split}"
    refuse_several(found, what="--source.files are", todo=f"pack each as its own dataset, for example: {example}")


class ClassPaths:
    """Derives the classes of a collection from its folders, and remembers folders that could be meant as separate
    classes.

    `auto` takes the first folder, as `first` does, and warns if a class has images in several folders.
    """

    def __init__(self, level: ClassLevel) -> None:
        self._level = level
        self._named: dict[str, str] = {}
        self._holds: dict[str, str] = {}
        self._nested: dict[str, tuple[str, str]] = {}
        self._num_merged = 0

    def class_of(self, folders: str, *, num_first: int = 1) -> str:
        """Returns the class of the images in a folder such as `a/airfield`. Warns if two folders get the same class.
        The first `num_first` names form the first level, and the last of them is its class."""
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
        """Warns if classes have images in several folders, because these folders could be the real classes."""
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


class PassedOver:
    """Counts the files that a source skips, by suffix. `why` describes these files, such as "with no image suffix"."""

    def __init__(self, *, why: str) -> None:
        self._why = why
        self._others, self._held = Counter[str](), Counter[str]()
        self._examples: dict[str, str] = {}

    def add(self, name: str) -> None:
        """Counts a file. Keeps the name of one archive or image per suffix, as an example for the warning."""
        suffix = _suffix(name)
        if is_archive(name) or suffix.lower() in IMAGE_SUFFIXES:
            self._held[suffix] += 1
            self._examples.setdefault(suffix, printable(name))
        else:
            self._others[suffix] += 1

    def mention(self, root: str) -> None:
        """Logs which files below `root` were skipped."""
        for suffix, count in sorted(self._held.items()):
            message = "%s: passed over %s %s, such as %s; no image in them is packed; repack them if they belong to it"
            log.warning(message, printable(root), plural(count, f"{suffix} file"), self._why, self._examples[suffix])
        if self._others:
            kinds = ", ".join(f"{count} {suffix}" for suffix, count in sorted(self._others.most_common(5)))
            files = plural(self._others.total(), "file")
            log.info("%s: skipped %s %s: %s", printable(root), files, self._why, kinds)


def is_archive(name: str) -> bool:
    """Returns whether a file's name is that of an archive, compressed or not."""
    return _ARCHIVE.search(name) is not None


def _suffix(name: str) -> str:
    """Returns the suffix of a file's name with its dot, or "without a suffix"."""
    _, dot, suffix = name.rpartition("/")[2].rpartition(".")
    return f".{printable(suffix)}" if dot and len(suffix) < _LONGEST_SUFFIX else "without a suffix"
