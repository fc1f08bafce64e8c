"""Sets a test split aside: a share of each class, chosen by the images' bytes, so that equal images stay together."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from shards.hashing import TEST_SPLIT, hash_array
from shards.packing.config import SetAside


def rows_of_other_side(
    config: SetAside,
    rows: NDArray[np.int64],
    sha_prefix: NDArray[np.uint64],
    labels: pa.ChunkedArray,
    *,
    seed: int,
) -> NDArray[np.int64]:
    """Those of `rows` that are not on this dataset's side. `labels`: those of these rows; `sha_prefix`: the first 8
    bytes of the sha256 of every scanned image."""
    is_test = is_set_aside(sha_prefix[rows], labels, share=config.share, seed=seed)
    return rows[is_test if config.side == "train" else ~is_test]


def is_set_aside(
    sha_prefix: NDArray[np.uint64], labels: pa.ChunkedArray, *, share: float, seed: int
) -> NDArray[np.bool_]:
    """Whether each image is of the test split: the first ones of its class in the order of a keyed hash of its bytes.

    Of a class of n different images, `share` x n are, rounded, but at least one and not all; a class of one image stays
    whole in the training split. Equal images go together, with the class of the first of them. An image with several
    labels counts with its first one; those without a label are one class.
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
