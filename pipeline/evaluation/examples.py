"""Images to look at beside the scores: some that the model gets right, and its most confident mistakes."""

import heapq
import io
from contextlib import closing
from dataclasses import asdict, dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from pipeline.data.config import Share
from pipeline.data.evaluation import evaluation_batches
from pipeline.evaluation.targets import answers
from pipeline.ranks.collectives import gather_json
from pipeline.shared_settings import EvaluationTransform
from shards.dataset import Dataset
from shards.hashing import EXAMPLES, hash_array

_MOST_SIDE = 160  # pixels
_SMALL_SIDE = 64  # images up to this one are kept without loss
_QUALITY = 88


@dataclass(frozen=True, kw_only=True)
class Example:
    """An image and the model's answer. `labels`: the image's, as numbers of the dataset; `said`: the class with the
    highest logit, whose probability is `confidence`."""

    sample_id: int
    labels: tuple[int, ...]
    said: int
    confidence: float
    is_right: bool


class Examples:
    """Keeps the `num` (0: none) mistakes with the highest confidence, and `num` right answers, chosen by a keyed hash
    of the sample id.

    They are the same for any number of ranks, unless rounding changes which mistake is the more confident.
    """

    def __init__(self, num: int) -> None:
        self._num = num
        self._right: list[Example] = []
        self._wrong: list[Example] = []

    def add(
        self,
        sample_ids: NDArray[np.int64],
        logits_BK: torch.Tensor,
        targets_BL: torch.Tensor,
        groups_BL: torch.Tensor,
        *,
        confidence_B: torch.Tensor,
    ) -> None:
        """Adds the images of a batch, as `Counts.add` does. Those without a target are left out."""
        if not self._num:
            return
        said_B, is_scored_B, is_right_B = answers(logits_BK, targets_BL)
        found = [
            Example(
                sample_id=int(sample_ids[at]),
                labels=tuple(number for number in groups_BL[at].tolist() if number >= 0),
                said=int(said_B[at]),
                confidence=float(confidence_B[at]),
                is_right=bool(is_right_B[at]),
            )
            for at in is_scored_B.nonzero()[:, 0].tolist()
        ]
        self._keep(found)

    def over_ranks(self, device: torch.device) -> None:
        """Chooses among the examples of all ranks, on every rank. Collective."""
        if not self._num:
            return
        of_ranks = gather_json([asdict(one) for one in self.chosen()], device=device)
        self._right, self._wrong = [], []
        self._keep([Example(**{**one, "labels": tuple(one["labels"])}) for rank in of_ranks for one in rank])

    def chosen(self) -> list[Example]:
        """Returns the right answers, then the mistakes, the most confident first."""
        return [*self._right, *self._wrong]

    def _keep(self, found: list[Example]) -> None:
        right = [*self._right, *(one for one in found if one.is_right)]
        wrong = [*self._wrong, *(one for one in found if not one.is_right)]
        hashes = hash_array(np.array([one.sample_id for one in right], dtype=np.int64), key=EXAMPLES.key(0)).tolist()
        by_hash = dict(zip([one.sample_id for one in right], hashes, strict=True))
        self._right = heapq.nsmallest(self._num, right, key=lambda one: (by_hash[one.sample_id], one.sample_id))
        self._wrong = heapq.nsmallest(self._num, wrong, key=lambda one: (-one.confidence, one.sample_id))


def pictures(
    dataset: Dataset, sample_ids: list[int], *, image_size: int, transform: EvaluationTransform, threads: int
) -> list[tuple[str, bytes]]:
    """Shows for each sample what the model sees of it, as a small image file: (media type, bytes). Not collective."""
    batches = evaluation_batches(
        dataset,
        batch_size=max(1, len(sample_ids)),
        image_size=image_size,
        transform=transform,
        share=Share(global_batch=max(1, len(sample_ids)), rank=0, num_ranks=1),
        threads=threads,
        sample_ids=np.array(sample_ids, dtype=np.int64),
    )
    with closing(batches):
        return [_encoded(image) for batch, mask_B in batches for image in batch.images[mask_B].numpy()]


def _encoded(image_HW3: NDArray[np.uint8]) -> tuple[str, bytes]:
    """Encodes an image as PNG if it is small, else as JPEG of at most 160 pixels a side."""
    image, file = Image.fromarray(image_HW3), io.BytesIO()
    if max(image.size) <= _SMALL_SIDE:
        image.save(file, "PNG")
        return "image/png", file.getvalue()
    image.thumbnail((_MOST_SIDE, _MOST_SIDE))
    image.save(file, "JPEG", quality=_QUALITY)
    return "image/jpeg", file.getvalue()
