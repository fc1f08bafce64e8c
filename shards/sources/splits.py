"""Refuses folders and files named like splits, which would otherwise become classes or be mixed in one dataset."""

import re
import shlex
from collections.abc import Iterable, Sequence

from shards.errors import UserError
from shards.output.quantities import plural

_SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "validation"),
    **dict.fromkeys(("test", "testing"), "test"),
}
_NO_LETTERS = re.compile(r"[^a-z]+")


def split_of(name: str) -> str:
    """The split that a folder or file of this name holds: train, validation or test; empty for any other name."""
    return _SPLITS.get(name.casefold(), "")


def refuse_split_classes(root: str, classes: Iterable[str]) -> None:
    """Refuses class folders below `root` that are splits. Raises UserError if there are two or more, or no others."""
    names = set(classes)
    found = {name: split_of(name) for name in sorted(names) if split_of(name)}
    if len(set(found.values())) < 2 and (not found or len(found) < len(names)):
        return
    commands = []
    for name, split in found.items():
        folder = shlex.quote(f"{root.rstrip('/')}/{name}")
        commands.append(f"  patchline pack folder --source.root {folder} --split {split} --out DATA/{split}")
    what = f"--source.root {root!r} holds {', '.join(map(repr, found))}, which are names of splits, not of classes"
    raise UserError("\n".join([f"{what}; pack each as a dataset of its own:", *commands]))


def refuse_mixed_splits(paths: Sequence[str]) -> None:
    """Refuses files of different splits, by the words in their names below the folder that holds them all. A name of
    several splits, such as train_val.csv, is of none. Raises UserError."""
    shared = [path.rpartition("/")[0].split("/") for path in paths]
    num_shared = 0
    while all(len(parts) > num_shared and parts[num_shared] == shared[0][num_shared] for parts in shared):
        num_shared += 1
    found: dict[str, list[str]] = {}
    for path in paths:
        own = "/".join(path.split("/")[num_shared:])
        splits = {_SPLITS[word] for word in _NO_LETTERS.split(own.casefold()) if word in _SPLITS}
        if len(splits) == 1:
            found.setdefault(splits.pop(), []).append(path)
    if len(found) < 2:
        return
    first, files = next(iter(found.items()))
    counts = ", ".join(f"{split} ({plural(len(some), 'file')})" for split, some in found.items())
    raise UserError(
        f"--source.files are of the splits {counts}, which would become one dataset; pack each as its own dataset, "
        f"for example: --source.files {shlex.quote(files[0])}{' ...' if len(files) > 1 else ''} --split {first}"
    )
