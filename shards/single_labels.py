"""Labels of datasets whose images have exactly one each."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shards.dataset import Dataset
from shards.errors import UserError
from shards.output.terminal import printable_name

Ids = NDArray[np.int64]


def labels_of(dataset: Dataset, *, what: str) -> Ids:
    """int64[N]: the label of every sample. UserError if a sample has several or none, which `what` needs.

    Reads the index of every shard, and no image; the ranks of a host do so once.
    """
    [labels] = dataset.of_host("labels", lambda: (_labels_of(dataset, what=what),))
    return labels


def _labels_of(dataset: Dataset, *, what: str) -> Ids:
    found = []
    for shard in range(len(dataset.manifest.shards)):
        rows = dataset.sample_rows(shard)
        nums = np.diff(rows.label_ends)
        if (nums != 1).any():
            num = int(nums[nums != 1][0])
            raise UserError(
                f"{dataset.url} has a sample with {num or 'no'} label{'s' * (num > 1)}; {what} needs images with "
                "exactly one label: give another dataset"
            )
        found.append(rows.label_values.astype(np.int64))
    return np.concatenate(found) if found else np.zeros(0, dtype=np.int64)


def refuse_too_few(labels: Ids, names: Sequence[str], *, least: int, flag: str, url: str) -> None:
    """UserError if a class has fewer images than `least`, which `flag` asks for; `names` are those of the classes."""
    nums = np.bincount(labels, minlength=len(names))
    short = np.flatnonzero(nums < least)
    if short.size:
        fewest = int(short[np.argmin(nums[short])])
        others = f" ({short.size} of {len(names)} classes have too few)" if short.size > 1 else ""
        raise UserError(
            f"{url} has {nums[fewest]} images of class {printable_name(names[fewest])!r}, fewer than {flag}"
            f"{others}; allowed: at most {nums.min()} here"
            + ("" if nums.min() else ": none; give a dataset with images of every class")
        )
