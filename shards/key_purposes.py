"""The registry of what keys are derived for, so that no two kinds of draws share a key.

A key is derived from some words (seed, epoch, ...) and, last, the number of its purpose. Two purposes never share both
their number and their count of words, so none can have another's key. Only 5 is used twice, harmlessly: rotations have
one word before it, dropout four. The numbers decide the results of every run and dataset: never change one.

Four keys have no purpose: initial weights (seed, CRC-32 of the tensor's name), the pictures of a card (its own
constant, shard), the split of the digits (three constants), and the tries of a mixup weight (key of the weight, try).
"""

from dataclasses import dataclass

from shards.hashing import derive_key


@dataclass(frozen=True)
class Purpose:
    """`number` follows the values of `words` in the tuple that a key is derived from."""

    number: int
    words: tuple[str, ...]
    draws: str

    def key(self, *values: int) -> int:
        """The 64-bit key for these values of `words`."""
        if len(values) != len(self.words):
            raise TypeError(f"a key that draws {self.draws} takes {', '.join(self.words)}, not {len(values)} values")
        return derive_key(*values, self.number)


BLOCKS = Purpose(1, ("seed", "epoch"), "the order of an epoch's blocks")
WINDOWS = Purpose(2, ("seed", "epoch"), "the order of a window's samples")
CROPS = Purpose(3, ("seed", "epoch"), "the crop and flip of a sample")
SUBSTITUTES = Purpose(4, ("seed", "sample", "number"), "the sample that replaces a damaged one")
ROTATIONS = Purpose(5, ("seed",), "where each lane group starts in the period of a mixture")
DROPOUT = Purpose(5, ("seed", "step", "micro_step", "rank"), "the dropout masks of a micro-batch")
MIXUP = Purpose(6, ("seed", "step"), "the mixup weights of a batch")
DATASETS = Purpose(7, ("seed", "dataset"), "the seed of each further dataset of a mixture")
OPERATIONS = Purpose(8, ("seed", "epoch"), "the RandAugment operations of a sample")
STOCHASTIC_DEPTH = Purpose(9, ("seed", "step"), "the branches that each image of a batch leaves out")
MASKED_PATCHES = Purpose(10, ("seed", "step"), "the patches of each image of a batch that are corrupted")
SHOTS = Purpose(0x73686F74, ("seed",), "the few images of each class that a representation is measured with")  # "shot"
SUBSETS = Purpose(0x73756273, ("seed",), "the samples of a part of a dataset")  # "subs"
HELD_OUT = Purpose(0x68656C64, ("seed",), "the samples that are held out of training")  # "held"
EXAMPLES = Purpose(0x6578616D, ("seed",), "the right answers that are shown beside scores")  # "exam"
PACKING = Purpose(0x7061636B, ("seed",), "the order in which a dataset's samples are packed")  # "pack"

PURPOSES = (
    BLOCKS,
    WINDOWS,
    CROPS,
    SUBSTITUTES,
    ROTATIONS,
    DROPOUT,
    MIXUP,
    DATASETS,
    OPERATIONS,
    STOCHASTIC_DEPTH,
    MASKED_PATCHES,
    SHOTS,
    SUBSETS,
    HELD_OUT,
    EXAMPLES,
    PACKING,
)
