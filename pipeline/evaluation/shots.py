"""Which images of a dataset are the shots of a few-shot measurement: a pure function of labels, sample ids and a seed.

Each class's samples are ranked by a keyed hash of their ids, and the first k are its k shots: so 5 shots are among the
10 of the same seed, whatever else is asked for, and nothing depends on the order in which samples are read.
"""

import numpy as np
from numpy.typing import NDArray

from shards.hashing import SHOTS, hash_array

Ids = NDArray[np.int64]


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
