"""Ridge regression in closed form: how the paper measures frozen representations with a few images per class.

"An Image is Worth 16x16 Words", section 4.1: a regularised least-squares regression from representations to targets in
{-1, 1}^K, solved exactly. The paper names no constants; these are those of big_vision's evaluators/fewshot_lsr.py and
configs/common_fewshot.py: features are whitened by the mean and the deviation (plus 1e-5) of the training images, a
constant feature of 100 stands for the bias and so is hardly regularised, and the strength is 2^10. big_vision computes
in float32; here everything is float64.

Shape letters: N images, D width, K classes.
"""

from dataclasses import dataclass

import torch

BIAS = 100.0
L2 = 2.0**10
LEAST_STD = 1e-5
_ROWS = 4096  # of features that are scored together


@dataclass(frozen=True, kw_only=True)
class Whitening:
    """Mean and deviation of each feature over the training images: float64[D] each."""

    mean: torch.Tensor
    std: torch.Tensor

    def of(self, features_ND: torch.Tensor) -> torch.Tensor:
        """float64[N, D]."""
        return (features_ND.double() - self.mean) / self.std


@dataclass(frozen=True, kw_only=True)
class LinearClassifier:
    """Scores of whitened features: `weight` float64[D, K], `bias` float64[K]."""

    whitening: Whitening
    weight: torch.Tensor
    bias: torch.Tensor

    def scores(self, features_ND: torch.Tensor) -> torch.Tensor:
        """float64[N, K]."""
        return torch.addmm(self.bias, self.whitening.of(features_ND), self.weight)

    def accuracy(self, features_ND: torch.Tensor, labels_N: torch.Tensor) -> float:
        """Share of images whose highest score is their label's; of equal scores, the first counts."""
        right = 0
        for first in range(0, len(labels_N), _ROWS):
            rows = slice(first, first + _ROWS)
            right += int((self.scores(features_ND[rows]).argmax(dim=1) == labels_N[rows]).sum())
        return right / len(labels_N)


def whitening_of(features_ND: torch.Tensor) -> Whitening:
    """The whitening of training images; the deviation is that of the population."""
    wide_ND = features_ND.double()
    return Whitening(mean=wide_ND.mean(dim=0), std=wide_ND.std(dim=0, correction=0) + LEAST_STD)


def fit_ridge(
    features_ND: torch.Tensor, labels_N: torch.Tensor, *, num_classes: int, l2: float = L2
) -> LinearClassifier:
    """The exact solution for training images with labels 0 to K-1, on the features' device. `l2`: above 0.

    With X of whitened features and the constant, Y of targets: (X^T X + l2 I)^-1 X^T Y if there are at least as many
    images as features, else X^T (X X^T + l2 I)^-1 Y, the same by the push-through identity. Both matrices are positive
    definite, so Cholesky factors solve them.
    """
    whitening = whitening_of(features_ND)
    x_ND = torch.nn.functional.pad(whitening.of(features_ND), (0, 1), value=BIAS)
    num, width = x_ND.shape
    if num >= width:
        sums_KD = x_ND.new_zeros(num_classes, width).index_add_(0, labels_N, x_ND)
        moments_DK = (2 * sums_KD - x_ND.sum(dim=0)).T  # X^T Y without Y
        solution_DK = _solved(x_ND.T @ x_ND, moments_DK, l2=l2)
    else:
        targets_NK = x_ND.new_full((num, num_classes), -1.0)
        targets_NK[torch.arange(num, device=x_ND.device), labels_N] = 1.0
        solution_DK = x_ND.T @ _solved(x_ND @ x_ND.T, targets_NK, l2=l2)
    return LinearClassifier(whitening=whitening, weight=solution_DK[:-1], bias=BIAS * solution_DK[-1])


def _solved(gram: torch.Tensor, right: torch.Tensor, *, l2: float) -> torch.Tensor:
    """(gram + l2 I)^-1 right; changes `gram`."""
    gram.diagonal().add_(l2)
    return torch.cholesky_solve(right, torch.linalg.cholesky(gram))
