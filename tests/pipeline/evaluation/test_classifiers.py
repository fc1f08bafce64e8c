"""Ridge regression against NumPy, and the linear probe against scikit-learn."""

import time

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression

from pipeline.evaluation.classifiers import (
    BIAS,
    DEFAULT_STRENGTH,
    STRENGTHS,
    fit_logistic,
    fit_probe,
    fit_ridge,
    whitening_of,
)
from pipeline.evaluation.config import FewshotConfig

Array = NDArray[np.float64]


def oracle(x: Array, labels: NDArray[np.int64], test: Array, *, num_classes: int, l2: float) -> Array:
    """Scores of `test`: least squares by SVD on [X; sqrt(l2) I], which forms no product of X with itself."""
    mean, std = x.mean(axis=0), x.std(axis=0) + 1e-5
    x = np.hstack([(x - mean) / std, np.full((len(x), 1), 100.0)])
    targets = np.where(labels[:, None] == np.arange(num_classes), 1.0, -1.0)
    rows = np.vstack([x, np.sqrt(l2) * np.eye(x.shape[1])])
    solution = np.linalg.lstsq(rows, np.vstack([targets, np.zeros((x.shape[1], num_classes))]), rcond=None)[0]
    scores: Array = np.hstack([(test - mean) / std, np.full((len(test), 1), 100.0)]) @ solution
    return scores


def drawn(num: int, width: int, num_classes: int) -> tuple[Array, NDArray[np.int64], Array]:
    """Features of training images around their class's centre, their labels, and features of test images."""
    rng = np.random.default_rng(num + width)
    centres = rng.normal(size=(num_classes, width))
    labels = np.arange(num) % num_classes
    scale = rng.uniform(0.01, 30, size=width)
    x = (centres[labels] + rng.normal(size=(num, width))) * scale + rng.normal(size=width)
    return x, labels, (centres + rng.normal(size=centres.shape)) * scale


@pytest.mark.parametrize("l2", [FewshotConfig.l2, 1e-3])
@pytest.mark.parametrize(
    ("num", "width"),
    [
        pytest.param(120, 40, id="more images than features"),
        pytest.param(40, 39, id="as many as features with the constant"),
        pytest.param(40, 40, id="one fewer"),
        pytest.param(10, 200, id="one shot"),
    ],
)
def test_scores_are_those_of_numpy(num: int, width: int, l2: float) -> None:
    x, labels, test = drawn(num, width, 10)
    found = fit_ridge(torch.from_numpy(x), torch.from_numpy(labels), num_classes=10, l2=l2).scores(
        torch.from_numpy(test)
    )
    assert np.abs(found.numpy() - oracle(x, labels, test, num_classes=10, l2=l2)).max() < 1e-6


def test_the_constants_are_those_of_big_vision() -> None:
    assert (BIAS, FewshotConfig.l2) == (100.0, 1024.0)


def test_a_feature_that_never_changes_does_no_harm() -> None:
    x, labels, test = drawn(60, 8, 3)
    x[:, 2] = test[:, 2] = 7.0
    assert float(whitening_of(torch.from_numpy(x)).std[2]) == pytest.approx(1e-5)
    found = fit_ridge(torch.from_numpy(x), torch.from_numpy(labels), num_classes=3).scores(torch.from_numpy(test))
    assert np.allclose(found.numpy(), oracle(x, labels, test, num_classes=3, l2=FewshotConfig.l2), atol=1e-6)


def test_float32_features_are_computed_with_in_float64() -> None:
    x, labels, test = drawn(60, 8, 3)
    rounded = torch.from_numpy(x).float()
    found = fit_ridge(rounded, torch.from_numpy(labels), num_classes=3).scores(torch.from_numpy(test).float())
    wide = oracle(
        rounded.double().numpy(), labels, test.astype(np.float32).astype(np.float64), num_classes=3, l2=FewshotConfig.l2
    )
    assert found.dtype == torch.float64
    assert np.abs(found.numpy() - wide).max() < 1e-6


def test_accuracy_counts_the_highest_score() -> None:
    x, labels, _ = drawn(6000, 8, 3)  # more rows than are scored together
    classifier = fit_ridge(torch.from_numpy(x), torch.from_numpy(labels), num_classes=3)
    scores = classifier.scores(torch.from_numpy(x)).numpy()
    share = float((scores.argmax(axis=1) == labels).mean())
    assert classifier.accuracy(torch.from_numpy(x), torch.from_numpy(labels)) == pytest.approx(share)
    assert share > 0.5


def test_a_thousand_classes_of_ten_shots_take_seconds() -> None:
    """The size of ViT-H/14 on ImageNet; CPU time, since a test may share its cores."""
    generator = torch.Generator().manual_seed(0)
    x, labels = torch.randn(10_000, 1280, generator=generator), torch.arange(1000).repeat(10)
    before = time.process_time()
    classifier = fit_ridge(x, labels, num_classes=1000)
    spent = time.process_time() - before
    assert classifier.weight.shape == (1280, 1000)
    assert spent < 30, f"{spent:.1f} CPU-seconds on two cores are 15 s"


def drawn_shots(
    shots: int, width: int = 12, num_classes: int = 4, *, noise: float = 1.5, seed: int = 0
) -> torch.Tensor:
    """[K, S, D]: each class around its own centre."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(num_classes, 1, width, generator=torch.Generator().manual_seed(99))
    return centres + noise * torch.randn(num_classes, shots, width, generator=generator)


@pytest.mark.parametrize("l2", [1.0, 1e-2])
def test_it_is_the_minimum_of_scikit_learn(l2: float) -> None:
    features_ND, labels_N = drawn_shots(25).flatten(0, 1), torch.arange(4).repeat_interleave(25)
    found = fit_logistic(features_ND, labels_N, num_classes=4, l2=l2)
    x = whitening_of(features_ND).of(features_ND).numpy()
    other = LogisticRegression(C=1 / (l2 * len(x)), tol=1e-10, max_iter=10_000).fit(x, labels_N.numpy())
    assert np.abs(found.weight.numpy() - other.coef_.T).max() < 1e-4
    assert found.weight.dtype == torch.float64


def test_a_start_changes_nothing_but_the_way() -> None:
    features_ND, labels_N = drawn_shots(10).flatten(0, 1), torch.arange(4).repeat_interleave(10)
    strong = fit_logistic(features_ND, labels_N, num_classes=4, l2=1.0)
    before = strong.weight.clone()
    direct = fit_logistic(features_ND, labels_N, num_classes=4, l2=1e-2)
    warm = fit_logistic(features_ND, labels_N, num_classes=4, l2=1e-2, start=strong)
    assert torch.allclose(direct.weight, warm.weight, atol=1e-4)
    assert torch.equal(strong.weight, before)


def test_held_out_shots_decide_the_strength() -> None:
    _, with_noise = fit_probe(drawn_shots(25, noise=8.0))
    _, without = fit_probe(drawn_shots(25, noise=0.01))
    assert without == STRENGTHS[0], "of equal accuracies, the strongest"
    assert with_noise in STRENGTHS


def test_one_shot_has_nothing_to_hold_out() -> None:
    classifier, l2 = fit_probe(drawn_shots(1))
    assert l2 == DEFAULT_STRENGTH
    assert classifier.accuracy(drawn_shots(1).flatten(0, 1), torch.arange(4)) == 1


def test_it_agrees_with_the_ridge_regression() -> None:
    """Two ways to a linear classifier of the same features: neither is far better."""
    test_ND, labels_N = drawn_shots(200, seed=5).flatten(0, 1), torch.arange(4).repeat_interleave(200)
    train = drawn_shots(25)
    ridge = fit_ridge(train.flatten(0, 1), torch.arange(4).repeat_interleave(25), num_classes=4)
    probe, _ = fit_probe(train)
    assert abs(ridge.accuracy(test_ND, labels_N) - probe.accuracy(test_ND, labels_N)) < 0.06
