"""Says what is at a path where a packed dataset was expected, and which command turns it into a dataset."""

import os
import shlex
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from shards.errors import UserError
from shards.files.local_files import at_home
from shards.sources.entry import IMAGE_SUFFIXES
from shards.sources.names import names_for, splits_among

_MOST_ENTRIES, _MOST_FOLDERS = 1000, 50  # entries and folders to look at, so that this is quick for any folder
_NOT_PACKED = "not a packed dataset"


class NoDatasetError(UserError):
    """There is no complete dataset at a URL. `brief`: what is there, in a few words."""

    def __init__(self, brief: str, why: str = "", *, todo: str = "") -> None:
        super().__init__(f"{brief}, {why}" if why else brief, todo=todo)
        self.brief = brief


def no_dataset(url: str) -> NoDatasetError:
    """Returns the error that says what is at `url`, and what to do. For a bucket, it says only that there is no
    complete dataset."""
    if "://" in url:
        return _incomplete(url)
    path = Path(at_home(url))
    try:
        return _no_dataset(url, path)
    except OSError as error:
        what = f"{url!r} cannot be looked at ({error.strerror})"
        return NoDatasetError(what, todo="give the folder of a packed dataset")


def _no_dataset(url: str, path: Path) -> NoDatasetError:
    if not path.exists():
        command = f"patchline pack RECIPE --out {_word(url)}"
        return NoDatasetError(
            f"there is nothing at {url!r}", todo=f"check the path, or pack a dataset there: {command}"
        )
    if not path.is_dir():
        todo = "give the folder of a packed dataset (patchline pack and index make one)"
        return NoDatasetError(f"{url!r} is a file", todo=todo)
    names = [entry.name for entry in _entries(path)]
    if "plan" in names or "work" in names:
        what = f"{url!r} is not packed to its end (it has no manifest.json)"
        return NoDatasetError(what, todo="run the same patchline pack command again")
    if "job.yaml" in names:
        todo = f"data.url in {_word(url)}/job.yaml is the dataset that it trained on"
        return NoDatasetError(f"{url!r} is a run", "not a dataset", todo=todo)
    if "model.safetensors" in names:
        return NoDatasetError(f"{url!r} holds weights", "not a dataset", todo="give the folder of a packed dataset")
    out = _word(f"data/{path.resolve().name}")
    folders = [entry.name for entry in _entries(path) if entry.is_dir()]
    splits = splits_among(folders)
    if len(set(splits.values())) >= 2:
        lines = [
            _command(
                "flat" if _holds_images(path / name) else "folder",
                f"{url.rstrip('/')}/{name}",
                f"{out}-{_word(split)} --split {_word(split)}",
            )
            for name, split in sorted(names_for(splits).items())
        ]
        todo = "\n".join(["pack each first:", *lines])
        return NoDatasetError(f"{url!r} holds the splits of a collection", _NOT_PACKED, todo=todo)
    if any(_holds_images(path / name) for name in sorted(folders)[:_MOST_FOLDERS]):
        todo = f"pack it first:\n{_command('folder', url, out)}"
        return NoDatasetError(f"{url!r} holds folders of images", _NOT_PACKED, todo=todo)
    if inner := next((name for name in sorted(folders)[:_MOST_FOLDERS] if _holds_classes(path / name)), ""):
        command = _command("folder", f"{url.rstrip('/')}/{inner}", out)
        todo = f"it holds folders of images in {inner!r}: pack those first:\n{command}"
        return NoDatasetError(f"{url!r} is not a packed dataset", todo=todo)
    if any(_is_image(name) for name in names):
        above = _word(str(path.parent))
        todo = (
            "pack the folder above it, whose folders are the classes "
            f"(patchline pack folder --source.root {above}), or pack these with labels from their names or a table:\n"
            f"{_command('flat', url, out)}"
        )
        return NoDatasetError(f"{url!r} holds images", _NOT_PACKED, todo=todo)
    if any(name.endswith(".tar") for name in names):
        todo = f"index them: patchline index {_word(url)}"
        return NoDatasetError(f"{url!r} holds tars", _NOT_PACKED, todo=todo)
    if any(name.endswith(".parquet") for name in names):
        todo = "pack them: patchline pack parquet --help"
        return NoDatasetError(f"{url!r} holds Parquet files", _NOT_PACKED, todo=todo)
    return _incomplete(url)


def _incomplete(url: str) -> NoDatasetError:
    todo = f"pack it with: patchline pack RECIPE --out {_word(url)}"
    return NoDatasetError(f"{url} has no manifest.json", "so it is not a complete dataset", todo=todo)


def _command(recipe: str, root: str, out: str) -> str:
    return f"  patchline pack {recipe} --source.root {_word(root)} --out {out}"


def _word(path: str) -> str:
    return shlex.quote(path)


def _entries(path: Path) -> Iterator["os.DirEntry[str]"]:
    with os.scandir(path) as found:
        yield from islice(found, _MOST_ENTRIES)


def _holds_images(folder: Path) -> bool:
    try:
        return any(_is_image(entry.name) for entry in islice(_entries(folder), _MOST_FOLDERS))
    except OSError:
        return False


def _holds_classes(folder: Path) -> bool:
    try:
        inner = [Path(entry.path) for entry in islice(_entries(folder), _MOST_FOLDERS) if entry.is_dir()]
    except OSError:
        return False
    return any(_holds_images(each) for each in inner)


def _is_image(name: str) -> bool:
    return Path(name).suffix.lower() in IMAGE_SUFFIXES
