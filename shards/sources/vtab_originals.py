"""Tasks of VTAB-1k from the original image files, in the order that TFDS gives their examples.

TFDS sorts the examples of a split by the MD5 of the split's name and the example's key (`tensorflow_datasets/core/
hashing.py` and `shuffle.py`). Where the keys are file names, and TFDS copies the files as they are, the originals are
enough: DTD, EuroSAT, Oxford-IIIT Pets and RESISC45. The keys are those of the builders of these datasets.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from shards.config_values import shown_text
from shards.errors import InvalidDataError, UserError
from shards.output.quantities import plural
from shards.sources.tree import list_images
from shards.store import MissingObjectError, Store, open_store

_MOST_LIST_BYTES = 16 << 20


@dataclass(frozen=True, kw_only=True)
class Original:
    """An image file below the root, and the name of its class."""

    path: str
    label: str


@dataclass(frozen=True, kw_only=True)
class Originals:
    """The images of each of TFDS's splits, in TFDS's order, and the names of the classes in theirs."""

    splits: Mapping[str, list[Original]]
    names: tuple[str, ...]


def read_originals(task: str, root: str) -> Originals:
    """The originals of one of ORIGINALS. UserError if they are not all there: then the order is another."""
    originals = ORIGINALS[task](root)
    for split, expected in COUNTS[task].items():
        if (found := len(originals.splits[split])) != expected:
            raise UserError(
                f"--source.originals {root!r} has {plural(found, 'image')} of TFDS's split {split!r}; {task} has "
                f"{expected:,}, and their choice depends on all of them; give the folder with all images as published"
            )
    return originals


def _class_folders(root: str) -> Originals:
    """eurosat.py and resisc45: CLASS/FILE, all one split; the key is CLASS_FILE."""
    keys = dict[str, Original]()
    for path, _ in list_images(root):
        label, _, name = path.partition("/")
        if not name or "/" in name:
            what = f"--source.originals {root!r} has {shown_text(path)}"
            raise UserError(f"{what}; allowed: CLASS/IMAGE alone; give the folder that holds the class folders")
        keys[f"{label}_{name}"] = Original(path=path, label=label)
    return Originals(splits={"train": _ordered("train", keys)}, names=_sorted_names(keys))


def _dtd(root: str) -> Originals:
    """dtd.py: the first of the ten folds; the key is the line of its list."""
    store, splits, labels = open_store(root), dict[str, list[Original]](), dict[str, Original]()
    for split, name in (("train", "train1"), ("validation", "val1"), ("test", "test1")):
        lines = _lines(store, f"labels/{name}.txt")
        keys = {line: Original(path=f"images/{line}", label=line.partition("/")[0]) for line in lines}
        splits[split] = _ordered(split, keys)
        labels |= keys
    return Originals(splits=splits, names=_sorted_names(labels))


def _pets(root: str) -> Originals:
    """oxford_iiit_pet: NAME, CLASS from 1 on, and two more numbers; the key is NAME.jpg."""
    store, splits, classes = open_store(root), dict[str, list[Original]](), dict[int, str]()
    for split, name in (("train", "trainval"), ("test", "test")):
        path, keys = f"annotations/{name}.txt", dict[str, Original]()
        for line in _lines(store, path):
            image, *numbers = line.split(" ")
            label = image.rpartition("_")[0]
            if len(numbers) != 3 or not (numbers[0].isascii() and numbers[0].isdecimal()) or len(numbers[0]) > 4:
                what = f"{store.url}/{path} has the line {shown_text(line)}"
                raise InvalidDataError(f"{what}; allowed: NAME CLASS SPECIES BREED; give the published file")
            if classes.setdefault(int(numbers[0]), label) != label:
                what = f"{store.url}/{path}: class {numbers[0]} is {shown_text(label)} and {classes[int(numbers[0])]!r}"
                raise InvalidDataError(f"{what}; give the published file")
            keys[f"{image}.jpg"] = Original(path=f"images/{image}.jpg", label=label)
        splits[split] = _ordered(split, keys)
    return Originals(splits=splits, names=tuple(classes[number] for number in sorted(classes)))


ORIGINALS: Mapping[str, Callable[[str], Originals]] = {
    "dtd": _dtd,
    "eurosat": _class_folders,
    "pets": _pets,
    "resisc45": _class_folders,
}
COUNTS = {
    "dtd": {"train": 1880, "validation": 1880, "test": 1880},
    "eurosat": {"train": 27_000},
    "pets": {"train": 3680, "test": 3669},
    "resisc45": {"train": 31_500},
}
"""Images of each split, as published (tensorflow.org/datasets/catalog)."""


def _ordered(split: str, keys: Mapping[str, Original]) -> list[Original]:
    return [keys[key] for key in sorted(keys, key=lambda key: _hash(split, key))]


def _hash(split: str, key: str) -> bytes:
    """TFDS's hash of a key: the order of digests is that of the numbers that they stand for."""
    return hashlib.md5(f"{split}{key}".encode("utf-8", "surrogateescape"), usedforsecurity=False).digest()


def _sorted_names(keys: Mapping[str, Original]) -> tuple[str, ...]:
    return tuple(sorted({original.label for original in keys.values()}))


def _lines(store: Store, path: str) -> Iterator[str]:
    try:
        text = store.read(path, most_bytes=_MOST_LIST_BYTES).decode()
    except MissingObjectError as error:
        what = f"--source.originals {store.url!r} has no {path}"
        raise UserError(f"{what}; give the folder of the dataset as published") from error
    except UnicodeDecodeError as error:
        raise InvalidDataError(f"{store.url}/{path} is not UTF-8; give the published file") from error
    return (line.strip() for line in text.split("\n") if line.strip())
