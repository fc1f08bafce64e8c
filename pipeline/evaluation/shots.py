"""Which images of a dataset are the shots of a few-shot measurement: a pure function of labels, sample ids and a seed.

Each class's samples are ranked by a keyed hash of their ids, and the first k are its k shots: so 5 shots are among the
10 of the same seed, whatever else is asked for, and nothing depends on the order in which samples are read.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shards.dataset import Dataset
from shards.errors import UserError
from shards.hashing import hash_array
from shards.key_purposes import SHOTS
from shards.terminal import printable_name

Ids = NDArray[np.int64]


def labels_of(dataset: Dataset) -> Ids:
    """int64[N]: the label of every sample. UserError if a sample has several or none.

    Reads the index of every shard, and no image.
    """
    found = []
    for shard in range(len(dataset.manifest.shards)):
        rows = dataset.sample_rows(shard)
        nums = np.diff(rows.label_ends)
        if (nums != 1).any():
            num = int(nums[nums != 1][0])
            raise UserError(
                f"{dataset.url} has a sample with {num or 'no'} label{'s' * (num > 1)}; a few-shot measurement needs "
                "images with exactly one label: give another dataset"
            )
        found.append(rows.label_values.astype(np.int64))
    return np.concatenate(found) if found else np.zeros(0, dtype=np.int64)


def chosen_shots(labels: Ids, *, num_classes: int, shots: int, seed: int) -> Ids:
    """int64[num_classes, shots]: sample ids, each class's own in its row, in the order of the hash.

    `labels`: that of each sample id, 0 to num_classes - 1; each class has at least `shots` samples.
    """
    ids = np.arange(labels.size, dtype=np.int64)
    ranked = np.lexsort((ids, hash_array(ids, key=SHOTS.key(seed)), labels))
    nums = np.bincount(labels, minlength=num_classes)
    firsts = np.cumsum(nums) - nums
    chosen: Ids = ranked[firsts[:, None] + np.arange(shots)]
    return chosen


def refuse_too_few(labels: Ids, names: Sequence[str], *, shots: int, url: str) -> None:
    """UserError if a class has fewer images than shots; `names` are those of the classes."""
    nums = np.bincount(labels, minlength=len(names))
    short = np.flatnonzero(nums < shots)
    if short.size:
        least = int(short[np.argmin(nums[short])])
        others = f" ({short.size} of {len(names)} classes have too few)" if short.size > 1 else ""
        raise UserError(
            f"{url} has {nums[least]} images of class {printable_name(names[least])!r}, fewer than --shots {shots}"
            f"{others}; allowed: at most {nums.min()} shots here"
            + ("" if nums.min() else ": none; give a dataset with images of every class")
        )
