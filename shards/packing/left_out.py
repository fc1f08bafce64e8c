"""Chooses images that are left out of a dataset although they could be packed: copies, and images of the other split.

One of several images with equal bytes stays. A test split is a share of each class, chosen by the images' bytes, so
that equal images are in the same split.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from posixpath import normpath
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from shards.hashing import TEST_SPLIT, hash_array
from shards.packing.config import PackSpec
from shards.packing.evaluation_sets import bytes_rows

# The labels of an image, and their weights (empty if it has none).
Labels = tuple[tuple[str, ...], tuple[float, ...]]


@dataclass(frozen=True, kw_only=True)
class Duplicates:
    """Rows that are left out because they have the same bytes as an earlier row, which stays. `kept_sources[i]`: the
    source of the row that stays instead of `rows[i]`.

    `num_relabelled`: the number of copies whose labels differ from those of the row that stays. `num_relisted`: the
    number of rows that list the same image again, with other labels. `labels`: the merged labels of rows that stay, for
    images that are listed again and, under `merge`, for images with copies.
    """

    rows: NDArray[np.int64]
    kept_sources: pa.Array
    num_relabelled: int = 0
    num_relisted: int = 0
    labels: dict[int, Labels] = field(default_factory=dict)


def candidates(sha_prefix: NDArray[np.uint64], is_fit: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Returns the rows that share the first 8 bytes of their sha256 with another row, in rising order. Only rows that
    can be packed count."""
    fit = np.flatnonzero(is_fit)
    prefix = sha_prefix[fit]
    order = np.argsort(prefix, kind="stable")
    prefix = prefix[order]
    follows = np.zeros(len(prefix) + 1, np.bool_)
    follows[1:-1] = prefix[1:] == prefix[:-1]
    return np.sort(fit[order[follows[1:] | follows[:-1]]])


def find_duplicates(
    rows: NDArray[np.int64],
    read: Callable[[NDArray[np.int64]], pa.Table],
    *,
    policy: Literal["first", "merge"],
) -> Duplicates:
    """Finds duplicates among candidate rows. `read`: a function that returns the columns sha256, source, labels and
    weights of rows."""
    if not len(rows):
        return Duplicates(rows=rows, kept_sources=pa.array([], pa.string()))
    table = read(rows)
    sha256, _ = bytes_rows(table.column("sha256"))
    whole = np.ascontiguousarray(sha256).view(f"V{sha256.shape[1]}").reshape(-1)
    _, first, group = np.unique(whole, return_index=True, return_inverse=True)
    kept_place = first[group]
    dropped = np.flatnonzero(kept_place != np.arange(len(rows)))
    kept_place = kept_place[dropped]
    counts, merged = _merged(table, dropped, kept_place, policy=policy)
    return Duplicates(
        rows=rows[dropped],
        kept_sources=table.column("source").take(pa.array(kept_place)).combine_chunks(),
        num_relabelled=counts[False],
        num_relisted=counts[True],
        labels={int(rows[place]): labels for place, labels in merged.items()},
    )


def _merged(
    table: pa.Table, dropped: NDArray[np.int64], kept: NDArray[np.int64], *, policy: Literal["first", "merge"]
) -> tuple[Counter[bool], dict[int, Labels]]:
    """Merges the labels of rows that stay with those of the rows that are left out for them. Also counts the left-out
    rows with other labels, by whether they list the same image (True) or a copy of it (False).

    An image that is listed several times gets the labels of all its rows under either `policy`, which is about copies.
    """
    counts, merged = Counter[bool](), dict[int, Labels]()
    places = pa.array(dropped), pa.array(kept)
    ours, theirs = (table.select(["source", "labels", "weights"]).take(place) for place in places)
    rows = zip(kept.tolist(), ours.to_pylist(), theirs.to_pylist(), strict=True)
    for place, mine, other in rows:
        is_same = normpath(mine["source"]) == normpath(other["source"])
        is_relabelled = sorted(mine["labels"]) != sorted(other["labels"])
        counts[is_same] += is_relabelled
        if policy == "first" and not (is_same and is_relabelled):
            continue
        held = merged.get(place) or (tuple(other["labels"]), tuple(other["weights"] or ()))
        more = merged_labels(held, (tuple(mine["labels"]), tuple(mine["weights"] or ())))
        if is_relabelled or more != held:  # equal labels can have other weights
            merged[place] = more
    return counts, merged


def merged_labels(held: Labels, more: Labels) -> Labels:
    """Returns all labels of both, with those of `held` first. Weights are kept only if both have them; a label that is
    in both keeps the larger one."""
    if held[1] and more[1]:
        weights = dict(zip(*held, strict=True))
        for label, weight in zip(*more, strict=True):
            weights[label] = max(weight, weights.get(label, weight))
        return tuple(weights), tuple(weights.values())
    return tuple(dict.fromkeys((*held[0], *more[0]))), ()


def rows_of_other_side(
    spec: PackSpec, rows: NDArray[np.int64], sha_prefix: NDArray[np.uint64], labels: pa.ChunkedArray
) -> NDArray[np.int64]:
    """Returns the rows among `rows` that belong to the other split. `labels`: the labels of `rows`. `sha_prefix`: the
    first 8 bytes of the sha256 of every scanned image."""
    is_test = is_set_aside(sha_prefix[rows], labels, share=spec.split_test, seed=spec.seed)
    return rows[~is_test if spec.split == "test" else is_test]


def is_set_aside(
    sha_prefix: NDArray[np.uint64], labels: pa.ChunkedArray, *, share: float, seed: int
) -> NDArray[np.bool_]:
    """Returns whether each image is in the test split, which has the first images of each class in the order of a keyed
    hash of their bytes.

    If a class has n different images, `share` x n of them, rounded, are in the test split, but at least one and not
    all. A class of one image stays in the training split. Equal images are in the same split; the first of them
    determines their class. An image with several labels belongs to the class of the first, and images without a label
    form one class.
    """
    lists = labels.combine_chunks()
    has_label = pc.greater(pc.list_value_length(lists), 0)
    first_label = pc.list_element(pc.if_else(has_label, lists, pa.scalar([""], lists.type)), 0)
    images, first, image_of = np.unique(sha_prefix, return_index=True, return_inverse=True)
    class_of = first_label.dictionary_encode().indices.to_numpy()[first]
    draws = hash_array(images, key=TEST_SPLIT.key(seed))
    order = np.lexsort((images, draws, class_of))
    num_images = np.bincount(class_of)
    num_test = np.minimum(np.maximum(np.floor(share * num_images + 0.5), 1), num_images - 1).astype(np.int64)
    places = np.arange(len(order)) - np.repeat(np.cumsum(num_images) - num_images, num_images)
    is_test = np.zeros(len(order), np.bool_)
    is_test[order] = places < num_test[class_of[order]]
    return is_test[image_of]
