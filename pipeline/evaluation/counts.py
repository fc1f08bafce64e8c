"""What is counted of each image, as sums that ranks add up."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from pipeline.ranks.collectives import summed

_BINS = 15  # of confidence, as Guo et al., "On Calibration of Modern Neural Networks", 2017
_MOST_CELLS = 1 << 22  # of the confusion matrix: that of 2,000 classes


def answers(logits_BK: torch.Tensor, targets_BL: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns for each image the class that the model says, whether the image has a target (`targets_BL` is padded with
    -1), and whether it is right."""
    # The first of equal logits, as argmax: topk may take any of them.
    said_B, is_scored_B = logits_BK.argmax(dim=1), (targets_BL >= 0).any(dim=1)
    return said_B, is_scored_B, (said_B[:, None] == targets_BL).any(dim=1) & is_scored_B


class Counts:
    """Sums in float64 over images. `groups`: the dataset's labels; `classes`: those of the model.

    An image with several labels counts for each of them, and as right if the highest logit is one of its targets.
    Images without a target are counted, and do not count. `loss`: summed over images with one.
    """

    def __init__(self, *, num_groups: int, num_classes: int) -> None:
        self.images, self.scored, self.right, self.right_in_five, self.loss = torch.zeros(5, dtype=torch.float64)
        self.of_group = torch.zeros(2, num_groups, dtype=torch.float64)  # images, right ones
        self.of_bin = torch.zeros(3, _BINS, dtype=torch.float64)  # images, summed confidence, right ones
        cells = num_groups * num_classes
        # Of each pair all images, and those that are right: of one pair some may be, by lists or with several labels.
        self.confusion, self.confusion_right = torch.zeros(2, cells if cells <= _MOST_CELLS else 0, dtype=torch.float64)
        self.num_groups, self.num_classes = num_groups, num_classes

    def add(
        self, logits_BK: torch.Tensor, targets_BL: torch.Tensor, groups_BL: torch.Tensor, *, confidence_B: torch.Tensor
    ) -> None:
        """Images whose right classes are `targets_BL`, padded with -1, and whose labels are `groups_BL`."""
        said_B, is_scored_B, right_B = answers(logits_BK, targets_BL)
        self.images += len(targets_BL)
        self.scored += is_scored_B.sum()
        best_B5 = logits_BK.topk(min(5, self.num_classes), dim=1).indices
        in_five_B = (best_B5[:, :, None] == targets_BL[:, None, :]).flatten(start_dim=1).any(dim=1) & is_scored_B
        self.right += right_B.sum()
        self.right_in_five += (in_five_B | right_B).sum()
        bins_B = (confidence_B * _BINS).nan_to_num(nan=0.0).clamp(0, _BINS - 1).long()[is_scored_B]
        weighted = torch.stack([torch.ones_like(confidence_B), confidence_B, right_B.to(confidence_B.dtype)])
        self.of_bin.index_add_(1, bins_B, weighted[:, is_scored_B].double())
        images, places = torch.nonzero((groups_BL >= 0) & is_scored_B[:, None], as_tuple=True)
        groups = groups_BL[images, places]
        counted = torch.stack([torch.ones(len(images)), right_B[images].float()]).double()
        self.of_group.index_add_(1, groups, counted)
        if self.confusion.numel():
            cells = groups * self.num_classes + said_B[images]
            self.confusion.index_add_(0, cells, torch.ones(len(cells), dtype=torch.float64))
            self.confusion_right.index_add_(0, cells, right_B[images].double())

    def over_ranks(self, device: torch.device) -> None:
        """Adds up the sums of all ranks, on every rank. Collective."""
        scalars, tables = ("images", "scored", "right", "right_in_five", "loss"), ("of_group", "of_bin")
        names = (*scalars, *tables, "confusion", "confusion_right")
        parts = [getattr(self, name) for name in names]
        total = summed(torch.cat([part.reshape(-1) for part in parts]), device=device)
        for name, part, own in zip(names, parts, torch.split(total, [part.numel() for part in parts]), strict=True):
            setattr(self, name, own.reshape(part.shape))

    def chance(self) -> float:
        """The accuracy of one answer for all images: the share of the most frequent label."""
        return float(self.of_group[0].max() / self.scored)

    def mean_per_class(self) -> float:
        """Mean over the labels of their share of right images; NaN without any."""
        images, right = self.of_group
        return float((right[images > 0] / images[images > 0]).mean()) if bool((images > 0).any()) else math.nan

    def calibration_error(self) -> float:
        """Expected calibration error: the mean distance between confidence and accuracy, over bins of confidence."""
        images, confidence, right = self.of_bin
        return float((confidence - right).abs().sum() / images.sum())

    def of_classes(self, labels: Sequence[str], classes: Sequence[str]) -> dict[str, Any]:
        """Counts for each label of the dataset how many images count and how many of them are right; and the confusion
        matrix, as [label, class, images] for what is not 0; `confusion_right` has the same of the right answers.
        Numbers are places in `labels` and `classes`. No matrix for more than 4 million pairs."""
        images, right = (part.long().tolist() for part in self.of_group)
        found: dict[str, Any] = {"labels": list(labels), "images": images, "right": right}
        if not self.confusion.numel():
            return found
        found |= {"classes": list(classes)}
        return found | {name: self._cells(getattr(self, name)) for name in ("confusion", "confusion_right")}

    def _cells(self, matrix: torch.Tensor) -> list[list[int]]:
        matrix = matrix.reshape(self.num_groups, self.num_classes).long()
        places = matrix.nonzero()
        cells: list[list[int]] = torch.cat([places, matrix[places[:, :1], places[:, 1:]]], dim=1).tolist()
        return cells
