"""Linear classifiers of frozen representations: ridge regression in closed form, and a linear probe as a cross-check.

As in "An Image is Worth 16x16 Words", section 4.1, the regression is a regularised least-squares regression from
representations to targets in {-1, 1}^K, solved exactly. The paper gives no constants; those used here are from
big_vision's evaluators/fewshot_lsr.py and configs/common_fewshot.py: features are whitened by the mean and the
deviation (plus 1e-5) of the training images, a constant feature of 100 takes the place of a bias and so is hardly
regularised, and the strength is 2^10. big_vision computes in float32; here everything is float64.

The probe is a logistic regression by L-BFGS on the same images and the same whitened features. Its loss is the mean
cross-entropy plus l2 / 2 times the sum of the squared weights, without the bias, as in scikit-learn's
LogisticRegression with C = 1 / (l2 N). Several strengths are tried, the one with the best accuracy on held-out shots is
kept, and the probe is then fitted to all shots.

Shape letters: N images, D width, K classes, S shots.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import cross_entropy

from pipeline.evaluation.config import FewshotConfig

BIAS = 100.0
LEAST_STD = 1e-5
_ROWS = 4096  # images that are scored together
STRENGTHS = (1.0, 1e-1, 1e-2, 1e-3, 1e-4)  # the strongest first: each fit starts from the one before
DEFAULT_STRENGTH = 1e-1  # used if no shot can be held out
_HELD_OUT = 5  # one shot in five is held out
_MOST_ITERATIONS = 200


@dataclass(frozen=True, kw_only=True)
class Whitening:
    """The mean and deviation of each feature over the training images: float64[D] each."""

    mean: torch.Tensor
    std: torch.Tensor

    def of(self, features_ND: torch.Tensor) -> torch.Tensor:
        """Returns the whitened features, float64[N, D]."""
        return (features_ND.double() - self.mean) / self.std


@dataclass(frozen=True, kw_only=True)
class LinearClassifier:
    """A linear classifier of whitened features: `weight` is float64[D, K], `bias` is float64[K]."""

    whitening: Whitening
    weight: torch.Tensor
    bias: torch.Tensor

    def scores(self, features_ND: torch.Tensor) -> torch.Tensor:
        """Returns the scores of the classes, float64[N, K]."""
        return torch.addmm(self.bias, self.whitening.of(features_ND), self.weight)

    def accuracy(self, features_ND: torch.Tensor, labels_N: torch.Tensor) -> float:
        """Returns the share of images for which the label has the highest score. Among equal scores, the first
        counts."""
        right = 0
        for first in range(0, len(labels_N), _ROWS):
            rows = slice(first, first + _ROWS)
            right += int((self.scores(features_ND[rows]).argmax(dim=1) == labels_N[rows]).sum())
        return right / len(labels_N)


def whitening_of(features_ND: torch.Tensor) -> Whitening:
    """Returns the whitening of training images. The deviations are population standard deviations, plus LEAST_STD."""
    wide_ND = features_ND.double()
    return Whitening(mean=wide_ND.mean(dim=0), std=wide_ND.std(dim=0, correction=0) + LEAST_STD)


def fit_ridge(
    features_ND: torch.Tensor, labels_N: torch.Tensor, *, num_classes: int, l2: float = FewshotConfig.l2
) -> LinearClassifier:
    """Solves the regression exactly for training images with labels 0 to K-1, on the features' device. `l2`: the
    strength of the regularisation, above 0.

    X holds the whitened features and the constant, Y the targets. The solution is (X^T X + l2 I)^-1 X^T Y if there are
    at least as many images as features, else X^T (X X^T + l2 I)^-1 Y, which is the same by the push-through identity.
    Both matrices are positive definite, so Cholesky factors solve them.
    """
    whitening = whitening_of(features_ND)
    x_ND = torch.nn.functional.pad(whitening.of(features_ND), (0, 1), value=BIAS)
    num, width = x_ND.shape
    if num >= width:
        sums_KD = x_ND.new_zeros(num_classes, width).index_add_(0, labels_N, x_ND)
        moments_DK = (2 * sums_KD - x_ND.sum(dim=0)).T  # X^T Y, without building Y
        solution_DK = _solved(x_ND.T @ x_ND, moments_DK, l2=l2)
    else:
        targets_NK = x_ND.new_full((num, num_classes), -1.0)
        targets_NK[torch.arange(num, device=x_ND.device), labels_N] = 1.0
        solution_DK = x_ND.T @ _solved(x_ND @ x_ND.T, targets_NK, l2=l2)
    return LinearClassifier(whitening=whitening, weight=solution_DK[:-1], bias=BIAS * solution_DK[-1])


def _solved(gram: torch.Tensor, right: torch.Tensor, *, l2: float) -> torch.Tensor:
    """Returns (gram + l2 I)^-1 right. It overwrites `gram`."""
    gram.diagonal().add_(l2)
    return torch.cholesky_solve(right, torch.linalg.cholesky(gram))


def fit_probe(features_KSD: torch.Tensor) -> tuple[LinearClassifier, float]:
    """Fits the probe to S shots of each class, [K, S, D], in float64 on the features' device; returns it with its
    strength."""
    num_classes, shots, _ = features_KSD.shape
    l2 = DEFAULT_STRENGTH if shots == 1 else _best_strength(features_KSD)
    labels_N = torch.arange(num_classes, device=features_KSD.device).repeat_interleave(shots)
    return fit_logistic(features_KSD.flatten(0, 1), labels_N, num_classes=num_classes, l2=l2), l2


def fit_logistic(
    features_ND: torch.Tensor,
    labels_N: torch.Tensor,
    *,
    num_classes: int,
    l2: float,
    start: LinearClassifier | None = None,
) -> LinearClassifier:
    """Finds the minimum of the loss by L-BFGS, from `start` or, if it is None, from zero."""
    whitening = whitening_of(features_ND)
    x_ND = whitening.of(features_ND)
    weight_DK = start.weight.clone() if start else x_ND.new_zeros(x_ND.shape[1], num_classes)
    bias_K = start.bias.clone() if start else x_ND.new_zeros(num_classes)
    parameters = [weight_DK.requires_grad_(), bias_K.requires_grad_()]
    optimizer = torch.optim.LBFGS(
        parameters,
        max_iter=_MOST_ITERATIONS,
        tolerance_grad=1e-7,
        tolerance_change=1e-12,
        line_search_fn="strong_wolfe",
    )

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = cross_entropy(torch.addmm(bias_K, x_ND, weight_DK), labels_N) + l2 / 2 * weight_DK.square().sum()
        value.backward()  # type: ignore[no-untyped-call]
        return value

    with torch.enable_grad():
        optimizer.step(loss)  # type: ignore[no-untyped-call]
    return LinearClassifier(whitening=whitening, weight=weight_DK.detach(), bias=bias_K.detach())


def _best_strength(features_KSD: torch.Tensor) -> float:
    """Returns the strength with the best accuracy on the last shots of each class; among equal ones, the strongest."""
    num_classes, shots, _ = features_KSD.shape
    kept = shots - max(1, shots // _HELD_OUT)
    classes = torch.arange(num_classes, device=features_KSD.device)
    held_out_ND, held_out_labels_N = features_KSD[:, kept:].flatten(0, 1), classes.repeat_interleave(shots - kept)
    found: LinearClassifier | None = None
    accuracies = []
    for l2 in STRENGTHS:
        found = fit_logistic(
            features_KSD[:, :kept].flatten(0, 1),
            classes.repeat_interleave(kept),
            num_classes=num_classes,
            l2=l2,
            start=found,
        )
        accuracies.append(found.accuracy(held_out_ND, held_out_labels_N))
    return STRENGTHS[accuracies.index(max(accuracies))]
