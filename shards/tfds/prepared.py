"""A dataset as TFDS prepares it: NAME[/CONFIG]/VERSION with dataset_info.json and shards of TFRecords.

The order of a split is that of its shards, one after the other: `train[:800]` in TFDS's notation is the first 800 of
them all (`tensorflow_datasets/core/splits.py` and `core/utils/shard_utils.py`).
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from shards.config_values import shown_value
from shards.errors import InvalidDataError, UserError
from shards.files.typed_json import parse_json
from shards.output.terminal import printable_name
from shards.store import MissingObjectError, Store, open_store

INFO_PATH = "dataset_info.json"
_MOST_INFO_BYTES = 64 << 20
_MOST_NAMES_BYTES = 4 << 20
_MOST_SHARDS, _MOST_EXAMPLES = 100_000, 1 << 40
_VERSION = re.compile(r"(\d{1,6})\.(\d{1,6})\.(\d{1,6})")
_TEMPLATE = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"
_NUMBER = re.compile(r"\d{1,13}")


@dataclass(frozen=True, kw_only=True)
class DatasetKey:
    """What TFDS calls a dataset: its name, its configuration (empty: it has none), and the major versions to accept.

    TFDS gives a new major version to a dataset whose examples or order change.
    """

    name: str
    config: str = ""
    majors: tuple[int, ...]

    @property
    def path(self) -> str:
        """Its folder below TFDS's data folder."""
        return f"{self.name}/{self.config}" if self.config else self.name

    @property
    def versions(self) -> str:
        """The versions, for a message."""
        return " and ".join(f"{major}.*.*" for major in self.majors)


@dataclass(frozen=True, kw_only=True)
class ShardSlice:
    """`count` examples of a shard from the one with number `first` on; the shard has `length`."""

    path: str
    first: int
    count: int
    length: int


@dataclass(frozen=True, kw_only=True)
class PreparedDataset:
    """A dataset that TFDS has prepared in `folder` of a store. `shard_lengths`: of each split, in order."""

    store: Store
    folder: str
    key: DatasetKey
    shard_lengths: dict[str, tuple[int, ...]]

    @property
    def where(self) -> str:
        """The folder, for a message."""
        return "/".join(filter(None, (self.store.url, self.folder)))

    def num_examples(self, split: str) -> int:
        """The examples of a split. UserError if there is none with this name."""
        if split not in self.shard_lengths:
            found = ", ".join(self.shard_lengths) or "none"
            raise UserError(f"{self.where} has no split {split!r}, but {printable_name(found)}; prepare it again")
        return sum(self.shard_lengths[split])

    def slices(self, split: str, first: int, end: int) -> Iterator[ShardSlice]:
        """Examples first..end-1 of a split, as slices of its shards."""
        lengths, begin = self.shard_lengths[split], 0
        for number, length in enumerate(lengths):
            low, high = max(first, begin), min(end, begin + length)
            if low < high:
                name = f"{self.key.name}-{split}.tfrecord-{number:05d}-of-{len(lengths):05d}"
                path = f"{self.folder}/{name}" if self.folder else name
                yield ShardSlice(path=path, first=low - begin, count=high - low, length=length)
            begin += length

    def class_names(self, feature: str) -> tuple[str, ...]:
        """The names of a label's classes; empty if TFDS has written none."""
        name = f"{feature}.labels.txt"
        try:
            data = self.store.read(f"{self.folder}/{name}" if self.folder else name, most_bytes=_MOST_NAMES_BYTES)
            return tuple(line.strip() for line in data.decode().split("\n") if line.strip())
        except MissingObjectError:
            return ()
        except UnicodeDecodeError as error:
            raise InvalidDataError(f"{self.where}/{name} is not UTF-8: {error}; prepare the dataset again") from error


def open_prepared(root: str, key: DatasetKey) -> PreparedDataset:
    """The dataset in TFDS's data folder, or in a dataset's own folder with a dataset_info.json. UserError if it is not
    there, or is something else; of several versions, the newest that `key` accepts."""
    if not root:
        raise UserError(
            "--source.root is missing; give the data folder of TensorFlow Datasets (often ~/tensorflow_datasets), or "
            f"the dataset's own folder in it, {key.path}/VERSION"
        )
    store = open_store(root)
    folder = "" if store.exists(INFO_PATH) else _newest_folder(store, key)
    path = f"{folder}/{INFO_PATH}" if folder else INFO_PATH
    where = f"{store.url}/{path}"
    try:
        info = parse_json(store.read(path, most_bytes=_MOST_INFO_BYTES))
        if not isinstance(info, dict):
            raise ValueError(f"it is {shown_value(info)}, not an object")
        _check_name(info, key, where)
        return PreparedDataset(store=store, folder=folder, key=key, shard_lengths=_shard_lengths(info))
    except ValueError as error:
        raise InvalidDataError(f"{where} is no description of a dataset: {error}; prepare it again") from error


def _newest_folder(store: Store, key: DatasetKey) -> str:
    found: dict[tuple[int, ...], str] = {}
    others = set()
    for path in store.list(key.path):
        folder, _, name = path.rpartition("/")
        version = _VERSION.fullmatch(folder.removeprefix(f"{key.path}/"))
        if name != INFO_PATH or not version:
            continue
        numbers = tuple(map(int, version.groups()))
        if numbers[0] in key.majors:
            found[numbers] = folder
        else:
            others.add(version[0])
    if not found:
        there = f"only version {', '.join(sorted(others))}" if others else f"no {key.path}/VERSION/{INFO_PATH}"
        raise UserError(
            f"--source.root {store.url!r} has {there}; wanted: version {key.versions}, which TFDS makes with "
            f"tfds build {key.path} --data_dir {store.url}"
        )
    return found[max(found)]


def _check_name(info: dict[str, Any], key: DatasetKey, where: str) -> None:
    """UserError if this is another dataset, version or file format."""
    version = _VERSION.fullmatch(str(info.get("version", "")))
    said = (info.get("name"), info.get("configName") or "")
    if said != (key.name, key.config) or not version or int(version[1]) not in key.majors:
        found = "/".join(filter(None, map(str, said))) + f":{info.get('version')}"
        raise UserError(
            f"{where} describes {shown_value(found)}; wanted: {key.path} of version {key.versions}; give its folder, "
            "or TFDS's data folder, as --source.root"
        )
    if (kind := info.get("fileFormat") or "tfrecord") != "tfrecord":
        raise UserError(
            f"{where}: the examples are in {shown_value(kind)} files; allowed: tfrecord; write them again with "
            "tfds build --file_format=tfrecord, or convert them with tfds convert_format --out_file_format=tfrecord"
        )


def _shard_lengths(info: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The lengths of the shards of each split; ValueError if they cannot be right."""
    splits, lengths = info.get("splits"), dict[str, tuple[int, ...]]()
    if not isinstance(splits, list):
        raise ValueError("it has no list of splits")
    for split in splits:
        name = split.get("name") if isinstance(split, dict) else None
        if not isinstance(name, str) or not re.fullmatch(r"[\w-]{1,100}", name) or name in lengths:
            raise ValueError(f"it has a split named {shown_value(name)}")
        if (split.get("filepathTemplate") or _TEMPLATE) != _TEMPLATE:
            template = shown_value(split["filepathTemplate"])
            raise ValueError(f"the files of split {name!r} are named {template}; allowed: {_TEMPLATE}")
        found = split.get("shardLengths", [])
        if not isinstance(found, list) or len(found) > _MOST_SHARDS:
            raise ValueError(f"the shardLengths of split {name!r} are no list of at most {_MOST_SHARDS}")
        lengths[name] = tuple(_length(item, name) for item in found)
        if sum(lengths[name]) > _MOST_EXAMPLES:
            raise ValueError(f"split {name!r} has {sum(lengths[name])} examples")
    return lengths


def _length(item: Any, split: str) -> int:
    """A number of examples; JSON of protocol buffers writes int64 as text."""
    text = str(item) if isinstance(item, str | int) and not isinstance(item, bool) else ""
    if not _NUMBER.fullmatch(text) or not text.isascii():
        raise ValueError(f"a shard of split {split!r} has {shown_value(item)} examples")
    return int(text)
