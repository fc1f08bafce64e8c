"""The linear probe: the minimum that scikit-learn finds, and a strength that held-out shots decide."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from pipeline.evaluation.probe import DEFAULT_STRENGTH, STRENGTHS, fit_logistic, fit_probe
from pipeline.evaluation.ridge import fit_ridge, whitening_of


def drawn(shots: int, width: int = 12, num_classes: int = 4, *, noise: float = 1.5, seed: int = 0) -> torch.Tensor:
    """[K, S, D]: each class around its own centre."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(num_classes, 1, width, generator=torch.Generator().manual_seed(99))
    return centres + noise * torch.randn(num_classes, shots, width, generator=generator)


@pytest.mark.parametrize("l2", [1.0, 1e-2])
def test_it_is_the_minimum_of_scikit_learn(l2: float) -> None:
    features_ND, labels_N = drawn(25).flatten(0, 1), torch.arange(4).repeat_interleave(25)
    found = fit_logistic(features_ND, labels_N, num_classes=4, l2=l2)
    x = whitening_of(features_ND).of(features_ND).numpy()
    other = LogisticRegression(C=1 / (l2 * len(x)), tol=1e-10, max_iter=10_000).fit(x, labels_N.numpy())
    assert np.abs(found.weight.numpy() - other.coef_.T).max() < 1e-4
    assert found.weight.dtype == torch.float64


def test_a_start_changes_nothing_but_the_way() -> None:
    features_ND, labels_N = drawn(10).flatten(0, 1), torch.arange(4).repeat_interleave(10)
    strong = fit_logistic(features_ND, labels_N, num_classes=4, l2=1.0)
    before = strong.weight.clone()
    direct = fit_logistic(features_ND, labels_N, num_classes=4, l2=1e-2)
    warm = fit_logistic(features_ND, labels_N, num_classes=4, l2=1e-2, start=strong)
    assert torch.allclose(direct.weight, warm.weight, atol=1e-4)
    assert torch.equal(strong.weight, before)


def test_held_out_shots_decide_the_strength() -> None:
    _, with_noise = fit_probe(drawn(25, noise=8.0))
    _, without = fit_probe(drawn(25, noise=0.01))
    assert without == STRENGTHS[0], "of equal accuracies, the strongest"
    assert with_noise in STRENGTHS


def test_one_shot_has_nothing_to_hold_out() -> None:
    classifier, l2 = fit_probe(drawn(1))
    assert l2 == DEFAULT_STRENGTH
    assert classifier.accuracy(drawn(1).flatten(0, 1), torch.arange(4)) == 1


def test_it_agrees_with_the_ridge_regression() -> None:
    """Two ways to a linear classifier of the same features: neither is far better."""
    test_ND, labels_N = drawn(200, seed=5).flatten(0, 1), torch.arange(4).repeat_interleave(200)
    train = drawn(25)
    ridge = fit_ridge(train.flatten(0, 1), torch.arange(4).repeat_interleave(25), num_classes=4)
    probe, _ = fit_probe(train)
    assert abs(ridge.accuracy(test_ND, labels_N) - probe.accuracy(test_ND, labels_N)) < 0.06
