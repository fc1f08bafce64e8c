"""A linear probe of frozen representations: logistic regression by L-BFGS, a cross-check of the ridge regression.

It sees the same images and the same whitened features. Its loss is the mean cross-entropy plus l2 / 2 times the sum of
the squared weights, without the bias; as in scikit-learn's LogisticRegression with C = 1 / (l2 N). The strength is the
one with the best accuracy on held-out shots; the probe is then fitted again to all shots.

Shape letters: N images, D width, K classes, S shots.
"""

import torch
from torch.nn.functional import cross_entropy

from pipeline.evaluation.ridge import LinearClassifier, whitening_of

STRENGTHS = (1.0, 1e-1, 1e-2, 1e-3, 1e-4)  # the strongest first: each fit starts from the one before
DEFAULT_STRENGTH = 1e-1  # if no shot can be held out
_HELD_OUT = 5  # one of this number of shots is held out
_MOST_ITERATIONS = 200


def fit_probe(features_KSD: torch.Tensor) -> tuple[LinearClassifier, float]:
    """The probe for S shots of each class, [K, S, D], and its strength. float64, on the features' device."""
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
    """The minimum of the loss, found by L-BFGS from `start` (else from zero)."""
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
    """The strength with the best accuracy on the last shots of each class; of equal ones the strongest."""
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
