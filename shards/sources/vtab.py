"""The tasks of VTAB-1k as a source, from the files of TensorFlow Datasets (TFDS) or from the original images.

TFDS sorts the examples of a split by the MD5 of the split's name and the example's key (`tensorflow_datasets/core/
hashing.py` and `shuffle.py`). The originals are enough if the keys are file names and TFDS copies the files unchanged:
for DTD, EuroSAT, Oxford-IIIT Pets and RESISC45. The keys are those that the builders of these datasets use.
"""

import hashlib
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from shards.class_names import class_name, labels_fault, repeated_fault
from shards.config_values import refuse_wrong_values, shown_text, shown_value
from shards.errors import ImageRefusedError, InvalidDataError, UserError
from shards.output.quantities import plural
from shards.sources.archives import TarReader
from shards.sources.entry import Entry, ImageBytes, Reader, printable, too_large
from shards.sources.tfds import (
    AROUND_BYTES,
    DamagedShardError,
    Feature,
    PreparedDataset,
    ShardSlice,
    Span,
    TfRecord,
    open_prepared,
    read_features,
    read_records,
)
from shards.sources.tree import Tree, list_images
from shards.sources.vtab_tasks import VTAB_TASKS, TaskData
from shards.storage.ahead import Pieces, stored_pieces
from shards.store import MissingObjectError, Store, open_store

VtabSplit = Literal["train", "train800", "val200", "test"]
_IMAGE = "image"
_NUM_AT_ONCE = 8192  # the most examples in one scan task: SVHN's test set is a single shard
_MORE_BYTES = 1 << 20  # a record's bytes besides its image
_MOST_ID_BYTES = 512
_MOST_BINARY_PIXELS = 1 << 20
_MOST_LIST_BYTES = 16 << 20
COUNTS = {
    "dtd": {"train": 1880, "validation": 1880, "test": 1880},
    "eurosat": {"train": 27_000},
    "pets": {"train": 3680, "test": 3669},
    "resisc45": {"train": 31_500},
}
"""The number of images in each split, as published (tensorflow.org/datasets/catalog)."""


@dataclass(frozen=True, kw_only=True)
class VtabSource:
    """One task of VTAB-1k from the files that TFDS has prepared or, for some tasks, from the original images.

    The images are those that task_adaptation uses, copied byte for byte. The one exception is dSprites, whose pixels 0
    and 1 become 0 and 255, as in task_adaptation. An example is a refused image if it is damaged, or if its label is
    not one of the task's.
    """

    staged: ClassVar[bool] = False
    labels_are_names: ClassVar[bool] = True
    kind: Literal["vtab"] = "vtab"
    root: str = ""
    """Data folder of TensorFlow Datasets, local or s3://, or the dataset's own folder in it, NAME/VERSION."""
    originals: str = ""
    """Folder of the original images, local or s3://, instead of TFDS's: for dtd, eurosat, pets and resisc45."""
    task: str = ""
    """Task of VTAB-1k, such as svhn or clevr_count."""
    split: VtabSplit = "train"
    """Images of the task: train (1,000), of which train800 and val200 are for tuning, or test; --split sets it."""

    def __post_init__(self) -> None:
        refuse_wrong_values(self, where="source.")
        if self.task and self.task not in (names := [task.name for task in VTAB_TASKS]):
            raise UserError(f"--source.task is {shown_value(self.task)}; allowed: {', '.join(names)}")
        if self.originals and self.root:
            raise UserError("--source.root and --source.originals do not go together; give one of them")
        if self.originals and self.task:
            self._refuse_other_originals()

    def _refuse_other_originals(self) -> None:
        if self.task not in ORIGINALS:
            raise UserError(
                f"--source.originals is given for {self.task}; allowed: {', '.join(ORIGINALS)}; prepare this task with "
                f"tfds build {self._task().dataset.path}, and give --source.root"
            )

    def entries(self) -> Iterator[Entry]:
        """Yields, in TFDS's order, one entry per original image, or one per 8,192 examples of a shard or fewer."""
        return self._original_entries() if self.originals else self._prepared_entries()

    def _original_entries(self) -> Iterator[Entry]:
        originals = read_originals(self._task().name, self.originals).splits
        for piece in self._task().parts.pieces(self.split, {split: len(originals[split]) for split in originals}):
            for original in originals[piece.split][piece.first : piece.end]:
                yield Entry(locator=original.path, name=printable(original.path), labels=(original.label,))

    def _prepared_entries(self) -> Iterator[Entry]:
        prepared = self._prepared()
        counts = {split: prepared.num_examples(split) for split in self._task().parts.splits}
        for piece in self._task().parts.pieces(self.split, counts):
            if piece.end > counts[piece.split]:
                raise UserError(
                    f"{prepared.where}: split {piece.split!r} has {plural(counts[piece.split], 'example')}, and "
                    f"{self.task} takes those from {piece.first} to {piece.end - 1}; prepare the whole dataset"
                )
            for found in prepared.slices(piece.split, piece.first, piece.end):
                num_bytes = _size(prepared, found)
                for first in range(found.first, found.first + found.count, _NUM_AT_ONCE):
                    count = min(_NUM_AT_ONCE, found.first + found.count - first)
                    yield Entry(
                        locator=f"{found.path}:{first}:{count}:{found.length}",
                        name=f"{found.path}:{first}",
                        num_bytes=num_bytes * count // found.length,
                        num_images=count,
                    )

    def images(self, entries: Sequence[Entry], *, max_bytes: int) -> Iterator[tuple[Entry, ImageBytes]]:
        """Yields the original images, or the examples of each entry, one shard after the other."""
        if self.originals:
            yield from Tree(root=self.originals).images(entries, max_bytes=max_bytes)
            return
        prepared, names = self._prepared(), self.known_labels()
        for entry in entries:
            shard, num_read = _slice_of(entry), 0
            try:
                with closing(_pieces(prepared.store, shard.path)) as pieces:
                    records = read_records(pieces, skip=shard.first, most_bytes=max_bytes + _MORE_BYTES)
                    for record in records:
                        yield self._image(shard, shard.first + num_read, record, names, max_bytes)
                        num_read += 1
                        if num_read == shard.count:
                            break
                    self._refuse_other_length(shard, num_read, pieces, prepared)
            except (DamagedShardError, OSError, EOFError, MissingObjectError) as error:
                reason = f"damaged or missing shard: {error}"
                for lost in range(num_read, shard.count):
                    yield _example_entry(shard, shard.first + lost), OSError(reason)

    def reader(self) -> Reader:
        """Returns a reader that finds images by path, offset and size, or originals by their paths."""
        if self.originals:
            return Tree(root=self.originals)
        return VtabReader(store=self._prepared().store, is_binary=self._task().is_binary)

    def _task(self) -> TaskData:
        for task in VTAB_TASKS:
            if task.name == self.task:
                return task
        names = ", ".join(task.name for task in VTAB_TASKS)
        raise UserError(f"--source.task is missing; allowed: {names}")

    def _prepared(self) -> PreparedDataset:
        return open_prepared(self.root, self._task().dataset)

    def known_labels(self) -> tuple[str, ...]:
        """Returns the names of all classes of the task, in order, even if some have no image among the 1,000. The names
        are those of the original images, the task's own, TFDS's, or the numbers."""
        task = self._task()
        if self.originals:
            return tuple(class_name(name) for name in read_originals(task.name, self.originals).names)
        if task.class_names:
            return task.class_names
        prepared = self._prepared()
        if not (found := prepared.class_names(task.features[0])):
            return tuple(str(number) for number in range(task.num_classes))
        names = tuple(class_name(name) for name in found)
        fault = f"{len(names)} names" if len(names) != task.num_classes else repeated_fault(names)
        if fault := fault or next(filter(None, (labels_fault((name,)) for name in names)), ""):
            what = f"{prepared.where}/{task.features[0]}.labels.txt has {fault}"
            raise InvalidDataError(f"{what}; allowed: {task.num_classes} names that differ; prepare the dataset again")
        return names

    def _image(
        self, shard: ShardSlice, number: int, record: TfRecord, names: tuple[str, ...], max_bytes: int
    ) -> tuple[Entry, ImageBytes]:
        """Returns the image of a record and its label, or the reason why there is none."""
        if isinstance(record.data, ImageRefusedError):
            return _example_entry(shard, number), record.data
        task, entry = self._task(), _example_entry(shard, number)
        try:
            example = read_features(record.data, [*task.features, _IMAGE, task.id_feature])
            entry = replace(entry, name=_name(entry.name, record.data, example.get(task.id_feature, ())))
            span = _only(example.get(_IMAGE, ()))
            label = names[task.label_of(example)]
        except ValueError as error:
            return entry, ImageRefusedError(f"not an example of {self.task}: {error}")
        num_bytes = span.end - span.begin
        locator = f"{shard.path}:{record.offset + span.begin}:{num_bytes}"
        entry = replace(entry, locator=locator, labels=(label,), num_bytes=num_bytes)
        if num_bytes > max_bytes:
            return entry, too_large(num_bytes, max_bytes=max_bytes)
        image = record.data[span.begin : span.end]
        return entry, _stretched(image) if task.is_binary else image

    def _refuse_other_length(self, shard: ShardSlice, num_read: int, pieces: Pieces, prepared: PreparedDataset) -> None:
        """Raises an error if the shard does not have as many records as dataset_info.json says, because the order would
        then be different."""
        if num_read < shard.count:
            raise DamagedShardError(f"it ends before example {shard.first + num_read} of {shard.length}")
        if shard.first + num_read == shard.length and pieces.position < pieces.end:
            raise InvalidDataError(
                f"{prepared.store.url}/{shard.path} has more than the {shard.length} examples that dataset_info.json "
                "says; prepare the dataset again"
            )


@dataclass(frozen=True, kw_only=True)
class VtabReader:
    """Reads images by locators `PATH:OFFSET:SIZE`. `is_binary`: the pixels are 0 and 1 and must be stretched."""

    store: Store
    is_binary: bool

    def read_many(self, locators: Sequence[str]) -> Iterator[ImageBytes]:
        """Yields the images in order, as TarReader does, with the pixels of dSprites stretched to 0 and 255."""
        for image in TarReader(store=self.store).read_many(locators):
            yield _stretched(image) if self.is_binary and isinstance(image, bytes) else image


def _slice_of(entry: Entry) -> ShardSlice:
    """Returns the examples of an entry of a shard."""
    path, first, count, length = entry.locator.rsplit(":", 3)
    return ShardSlice(path=path, first=int(first), count=int(count), length=int(length))


def _example_entry(shard: ShardSlice, number: int) -> Entry:
    """Returns the entry of one example, with the id that TFDS gives it (`ReadConfig.add_tfds_id`)."""
    return Entry(locator=f"{shard.path}:{number}", name=f"{shard.path.rpartition('/')[2]}__{number}")


def _size(prepared: PreparedDataset, shard: ShardSlice) -> int:
    """Returns the number of bytes of a shard. Raises an error if the shard is missing or too small for its examples,
    because every lost example would go on the quarantine list."""
    path, todo = f"{prepared.store.url}/{shard.path}", "copy the whole dataset, or prepare it again"
    try:
        num_bytes = prepared.store.size(shard.path)
    except MissingObjectError as error:
        raise UserError(f"{path} is missing, although dataset_info.json counts it; {todo}") from error
    if num_bytes < shard.length * AROUND_BYTES:
        what = f"{path} has {num_bytes} bytes, too few for the {shard.length} examples that dataset_info.json says"
        raise InvalidDataError(f"{what}; {todo}")
    return num_bytes


def _pieces(store: Store, path: str) -> Pieces:
    return stored_pieces(store, path, 0, store.size(path))


def _name(tfds_id: str, data: bytes, own: Feature) -> str:
    """Returns TFDS's id, followed by the example's name in the original dataset if it has one."""
    if len(own) == 1 and isinstance(own[0], Span) and 0 < own[0].end - own[0].begin <= _MOST_ID_BYTES:
        return f"{tfds_id}:{printable(data[own[0].begin : own[0].end].decode('utf-8', 'surrogateescape'))}"
    return tfds_id


def _only(image: Feature) -> Span:
    """Returns where the image lies. Raises ValueError unless there is exactly one."""
    if len(image) != 1 or not isinstance(image[0], Span):
        raise ValueError(f"its feature 'image' has {len(image)} values; allowed: the bytes of one image")
    return image[0]


def _stretched(png: bytes) -> bytes | ImageRefusedError:
    """Turns a grey PNG with pixels 0 and 1 into one with 0 and 255, as dsprites.py does. Returns a refusal for any
    other image."""
    from PIL import Image

    from shards.images.config import WIDEST_LIMITS
    from shards.images.image_header import read_header, refusal_of

    try:
        header = read_header(png, replace(WIDEST_LIMITS, max_pixels=_MOST_BINARY_PIXELS))
        if header.mode != "L":
            raise ImageRefusedError(f"an image of mode {header.mode}; allowed: grey, with pixels of 0 and 1")
        with Image.open(io.BytesIO(png), formats=("PNG",)) as image:
            low, high = image.getextrema()
            stretched = image.point(lambda value: value * 255)
    except ImageRefusedError as refusal:
        return refusal
    except MemoryError:  # this concerns the machine, not the image
        raise
    except Exception as error:  # for damage, Pillow raises nearly any of Python's exceptions
        return refusal_of(error)
    if not (isinstance(high, int) and isinstance(low, int) and high <= 1):
        return ImageRefusedError(f"its pixels go up to {high}; allowed: 0 and 1")
    file = io.BytesIO()
    stretched.save(file, format="PNG", compress_level=6)
    return file.getvalue()


@dataclass(frozen=True, kw_only=True)
class Original:
    """An image file below the root, and the name of its class."""

    path: str
    label: str


@dataclass(frozen=True, kw_only=True)
class Originals:
    """The images of each TFDS split, in TFDS's order, and the class names, in the order of the labels."""

    splits: Mapping[str, list[Original]]
    names: tuple[str, ...]


def read_originals(task: str, root: str) -> Originals:
    """Returns the originals of one of the tasks in ORIGINALS. Raises UserError if some are missing, because the order
    would then be different."""
    originals = ORIGINALS[task](root)
    for split, expected in COUNTS[task].items():
        if (found := len(originals.splits[split])) != expected:
            raise UserError(
                f"--source.originals {root!r} has {plural(found, 'image')} of TFDS's split {split!r}; {task} has "
                f"{expected:,}, and their choice depends on all of them; give the folder with all images as published"
            )
    return originals


def _class_folders(root: str) -> Originals:
    """Reads files CLASS/FILE, which form a single split. An image's key is CLASS_FILE (eurosat.py and resisc45)."""
    keys = dict[str, Original]()
    for path, _ in list_images(root):
        label, _, name = path.partition("/")
        if not name or "/" in name:
            what = f"--source.originals {root!r} has {shown_text(path)}"
            raise UserError(f"{what}; allowed: CLASS/IMAGE alone; give the folder that holds the class folders")
        keys[f"{label}_{name}"] = Original(path=path, label=label)
    return Originals(splits={"train": _ordered("train", keys)}, names=_sorted_names(keys))


def _dtd(root: str) -> Originals:
    """Reads the first of the ten folds. An image's key is its line in the fold's list (dtd.py)."""
    store, splits, labels = open_store(root), dict[str, list[Original]](), dict[str, Original]()
    for split, name in (("train", "train1"), ("validation", "val1"), ("test", "test1")):
        lines = _lines(store, f"labels/{name}.txt")
        keys = {line: Original(path=f"images/{line}", label=line.partition("/")[0]) for line in lines}
        splits[split] = _ordered(split, keys)
        labels |= keys
    return Originals(splits=splits, names=_sorted_names(labels))


def _pets(root: str) -> Originals:
    """Reads lists with lines of NAME, CLASS (counted from 1) and two more numbers. An image's key is NAME.jpg
    (oxford_iiit_pet)."""
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


def _ordered(split: str, keys: Mapping[str, Original]) -> list[Original]:
    return [keys[key] for key in sorted(keys, key=lambda key: _hash(split, key))]


def _hash(split: str, key: str) -> bytes:
    """Returns TFDS's hash of a key. Digests sort like the numbers that TFDS makes from them."""
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
