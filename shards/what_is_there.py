"""Says what is at a path where a packed dataset was expected, and which command turns it into a dataset."""

import os
import shlex
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from shards.files.local_files import at_home
from shards.sources.entry import IMAGE_SUFFIXES
from shards.sources.names import names_for, splits_among

_MOST_ENTRIES, _MOST_FOLDERS = 1000, 50  # entries and folders to look at: quick for any folder


def advice(url: str) -> str:
    """Returns what is at `url`, and what to do. For a bucket, it says only that there is no complete dataset."""
    if "://" in url:
        return _incomplete(url)
    path = Path(at_home(url))
    try:
        return _advice(url, path)
    except OSError as error:
        return f"{url!r} cannot be looked at ({error.strerror}); give the folder of a packed dataset"


def _advice(url: str, path: Path) -> str:
    if not path.exists():
        command = f"patchline pack RECIPE --out {_word(url)}"
        return f"there is nothing at {url!r}; check the path, or pack a dataset there: {command}"
    if not path.is_dir():
        return f"{url!r} is a file; give the folder of a packed dataset (patchline pack and index make one)"
    names = [entry.name for entry in _entries(path)]
    if "plan" in names or "work" in names:
        return f"{url!r} is not packed to its end (it has no manifest.json); run the same patchline pack command again"
    if "job.yaml" in names:
        return f"{url!r} is a run, not a dataset; data.url in {_word(url)}/job.yaml is the dataset that it trained on"
    if "model.safetensors" in names:
        return f"{url!r} holds weights, not a dataset; give the folder of a packed dataset"
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
        return "\n".join([f"{url!r} holds the splits of a collection, not a packed dataset; pack each first:", *lines])
    if any(_holds_images(path / name) for name in sorted(folders)[:_MOST_FOLDERS]):
        return f"{url!r} holds folders of images, not a packed dataset; pack it first:\n{_command('folder', url, out)}"
    if inner := next((name for name in sorted(folders)[:_MOST_FOLDERS] if _holds_classes(path / name)), ""):
        command = _command("folder", f"{url.rstrip('/')}/{inner}", out)
        return f"{url!r} is no packed dataset; it holds folders of images in {inner!r}: pack those first:\n{command}"
    if any(_is_image(name) for name in names):
        above = _word(str(path.parent))
        return (
            f"{url!r} holds images, not a packed dataset; pack the folder above it, whose folders are the classes "
            f"(patchline pack folder --source.root {above}), or pack these with labels from their names or a table:\n"
            f"{_command('flat', url, out)}"
        )
    if any(name.endswith(".tar") for name in names):
        return f"{url!r} holds tars, not a packed dataset; index them: patchline index {_word(url)}"
    if any(name.endswith(".parquet") for name in names):
        return f"{url!r} holds Parquet files, not a packed dataset; pack them: patchline pack parquet --help"
    return _incomplete(url)


def _incomplete(url: str) -> str:
    command = f"patchline pack RECIPE --out {_word(url)}"
    return f"{url} has no manifest.json, so it is not a complete dataset; pack it with: {command}"


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
