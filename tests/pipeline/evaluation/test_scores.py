"""Scores, counts and examples against NumPy, image by image, for any number of ranks."""

import io
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from pipeline.evaluation import scores as module
from pipeline.evaluation.config import EvaluationConfig
from pipeline.evaluation.scores import Counts, Example, Examples, Scores, evaluate, model_image_size, pictures
from pipeline.evaluation.targets import by_class_map
from pipeline.models import ModelConfig, build_model
from pipeline.models.build import Model
from pipeline.ranks.world import World
from pipeline.shared_settings import EvaluationTransform, LossName
from shards.dataset import open_dataset
from tests.rigs.datasets import packed_folders, packed_with_weights
from tests.rigs.processes import run_ranks

IMAGES, CLASSES, LABELS = 400, 12, 9
TINY = ModelConfig(name="vit", image_size=8, patch=4, depth=1, width=8, mlp_width=8, num_heads=2, num_classes=3)
PER_CLASS, NUM_SAMPLES = 5, 15
__all__ = ["packed"]


def counted(*, batch: int) -> tuple[Counts, dict[str, float], np.ndarray]:
    """Random answers in batches, and what NumPy makes of the same."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(IMAGES, CLASSES)).astype(np.float32)
    groups = np.where(rng.random((IMAGES, 2)) < 0.7, rng.integers(0, LABELS, (IMAGES, 2)), -1)
    targets = np.where(rng.random((IMAGES, 3)) < 0.4, rng.integers(0, CLASSES, (IMAGES, 3)), -1)
    odds = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    found = Counts(num_groups=LABELS, num_classes=CLASSES)
    for first in range(0, IMAGES, batch):
        rows = slice(first, first + batch)
        confidence = torch.from_numpy(odds[rows].max(axis=1))
        found.add(*(torch.from_numpy(x[rows]) for x in (logits, targets, groups)), confidence_B=confidence)
    return found, *by_numpy(logits, targets, groups, odds.max(axis=1))


def by_numpy(
    logits: np.ndarray, targets: np.ndarray, groups: np.ndarray, confidence: np.ndarray
) -> tuple[dict[str, float], np.ndarray]:
    matrix, of_group, bins = np.zeros((2, LABELS, CLASSES)), np.zeros((2, LABELS)), np.zeros((3, 15))
    num = right = in_five = 0
    for row in range(IMAGES):
        allowed = set(targets[row][targets[row] >= 0].tolist())
        if not allowed:
            continue
        said = int(logits[row].argmax())
        is_right = said in allowed
        num, right = num + 1, right + is_right
        in_five += bool(allowed & set(np.argsort(-logits[row])[:5].tolist()))
        bins[:, min(14, int(confidence[row] * 15))] += (1, confidence[row], is_right)
        for group in groups[row][groups[row] >= 0]:
            of_group[:, group] += (1, is_right)
            matrix[:, group, said] += (1, is_right)
    error = np.abs(bins[1] - bins[2]).sum() / num
    expected = {"scored": num, "right": right, "right_in_five": in_five, "error": error}
    return expected | {"mean": float((of_group[1] / of_group[0]).mean())}, matrix


@pytest.mark.parametrize("batch", [1, 7, 400])
def test_counts_are_those_of_numpy(batch: int) -> None:
    found, expected, matrix = counted(batch=batch)
    assert int(found.images) == IMAGES
    assert [int(getattr(found, name)) for name in ("scored", "right", "right_in_five")] == [
        expected[name] for name in ("scored", "right", "right_in_five")
    ]
    assert 0 < expected["right"] < expected["right_in_five"] < expected["scored"] < IMAGES
    assert found.mean_per_class() == pytest.approx(expected["mean"], rel=1e-12)
    assert found.calibration_error() == pytest.approx(expected["error"], rel=1e-6)
    assert torch.equal(found.confusion.reshape(LABELS, CLASSES), torch.from_numpy(matrix[0]))
    assert torch.equal(found.confusion_right.reshape(LABELS, CLASSES), torch.from_numpy(matrix[1]))
    shown = found.of_classes("abcdefghi", "abcdefghijkl")
    for name, sums in zip(("confusion", "confusion_right"), matrix, strict=True):
        assert shown[name] == [[*map(int, place), int(sums[tuple(place)])] for place in np.argwhere(sums)]


def test_few_classes_and_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """With three classes, all are among the five highest; beyond the limit there is no matrix."""
    monkeypatch.setattr(module, "_MOST_CELLS", 8)
    found = Counts(num_groups=3, num_classes=3)
    logits, labels = torch.eye(3), torch.tensor([[1], [1], [-1]])
    found.add(logits, labels, labels, confidence_B=torch.tensor([0.2, 1.0, 0.5]))
    assert [int(found.scored), int(found.right), int(found.right_in_five)] == [2, 1, 2]
    assert found.confusion.numel() == 0
    assert found.of_group.tolist() == [[0, 2, 0], [0, 1, 0]]
    assert found.mean_per_class() == 0.5
    assert found.of_bin[0].tolist() == [0, 0, 0, 1, *[0] * 10, 1], "confidence 1 is in the last bin"


def test_equal_logits_count_as_the_first_of_them() -> None:
    found = Counts(num_groups=9, num_classes=9)
    labels = torch.arange(9)[:, None]
    found.add(torch.zeros(9, 9), labels, labels, confidence_B=torch.full((9,), 1 / 9))
    assert int(found.right) == 1


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(packed_folders(tmp_path_factory.mktemp("scores"), num_classes=3, images_a_class=PER_CLASS))


def scores(world: World, url: str, batch_size: int, loss: LossName, bias: tuple[float, ...]) -> Scores:
    """Scores of a model whose head is zero except for its bias: it predicts the same for every image."""
    config = EvaluationConfig(url=url, batch_size=batch_size)
    return evaluate(biased(bias), open_dataset(url), config, labels=("c0", "c1", "c2"), loss=loss, world=world)[0]


def biased(bias: tuple[float, ...]) -> Model:
    """A model whose logits are these, whatever the image."""
    model = build_model(TINY)
    with torch.no_grad():
        model.head.bias.copy_(torch.tensor(bias))
    return model


def random_scores(world: World, url: str, batch_size: int) -> Scores:
    """Scores of a model that predicts something different for every image."""
    model = build_model(TINY)
    with torch.no_grad():
        model.head.weight.normal_(generator=torch.Generator().manual_seed(0))
    return evaluate(
        model,
        open_dataset(url),
        EvaluationConfig(batch_size=batch_size),
        labels=("c0", "c1", "c2"),
        loss="softmax",
        world=world,
    )[0]


def softplus(x: float) -> float:
    return math.log1p(math.exp(x))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_model_that_always_says_one_class_is_right_in_that_classes_share(packed: str, num_ranks: int) -> None:
    bias = (2.0, 0.0, 1.0)
    found = run_ranks(scores, packed, 4, "softmax", bias, num_ranks=num_ranks)
    for score in found:  # every rank has the sums over all ranks
        assert (score.num_images, score.accuracy) == (NUM_SAMPLES, PER_CLASS / NUM_SAMPLES)
        assert (score.num_unlabeled, score.top5, score.mean_per_class) == (0, 1.0, pytest.approx(1 / 3))
        confidence = math.exp(2) / sum(math.exp(x) for x in bias)
        assert score.calibration_error == pytest.approx(confidence - 1 / 3, rel=1e-6)
        partition = math.log(sum(math.exp(x) for x in bias))
        assert score.loss == pytest.approx(sum(partition - x for x in bias) / 3, rel=1e-6)


def test_the_sigmoid_loss_is_summed_over_classes(packed: str) -> None:
    (score,) = run_ranks(scores, packed, 4, "sigmoid", (2.0, 0.0, 1.0), num_ranks=1)
    of_class = [softplus(-2) + softplus(0) + softplus(1), softplus(2) + softplus(0) + softplus(1)]
    of_class.append(softplus(2) + softplus(0) + softplus(-1))
    assert score.loss == pytest.approx(sum(of_class) / 3, rel=1e-6)


def test_batches_and_ranks_change_no_score(packed: str) -> None:
    (expected,) = run_ranks(random_scores, packed, NUM_SAMPLES, num_ranks=1)
    others = [*run_ranks(random_scores, packed, 1, num_ranks=1), *run_ranks(random_scores, packed, 4, num_ranks=2)]
    for score in others:
        assert replace(score, loss=0.0, calibration_error=0.0) == replace(expected, loss=0.0, calibration_error=0.0)
        assert score.loss == pytest.approx(expected.loss, rel=1e-6)
        assert score.calibration_error == pytest.approx(expected.calibration_error, rel=1e-5)


@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_weights_of_labels_are_the_targets(tmp_path: Path, loss: LossName, num_ranks: int) -> None:
    """The loss is of the weights, and what has the weight 0 is no label."""
    url = str(packed_with_weights(tmp_path, ["c0|c2,1|0.5", "c0|c1,0|0.5", "c2,", "c1|c2,0|0"]))
    bias = (2.0, 0.0, 1.0)
    found, other = run_ranks(weighted_scores, url, loss, bias, num_ranks=num_ranks)[-1]
    total = sum(math.exp(one) for one in bias)
    minus_logs = [math.log(total) - one for one in bias]
    by_softmax = (minus_logs[0] * 2 / 3 + minus_logs[2] / 3) + minus_logs[1] + minus_logs[2]
    targets = [(1.0, 0.0, 0.5), (0.0, 0.5, 0.0), (0.0, 0.0, 1.0)]
    by_sigmoid = sum(softplus(x) - t * x for row in targets for x, t in zip(bias, row, strict=True))
    assert found.loss == pytest.approx((by_softmax if loss == "softmax" else by_sigmoid) / 3, rel=1e-6)
    assert (found.accuracy, other.accuracy) == (1 / 3, 0.5), "the label c0 of the second image has the weight 0"
    assert (found.num_images, found.num_unlabeled, other.num_unlabeled) == (3, 1, 0), "and the fourth has no other"


@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
def test_the_loss_is_of_images_with_a_target(packed: str, loss: LossName) -> None:
    """A class map leaves two labels out: the images of the third have the loss, however many others there are."""
    bias = (2.0, 0.0, 1.0)
    (found,) = run_ranks(mapped_scores, packed, loss, bias, num_ranks=1)
    softmax = math.log(sum(math.exp(one) for one in bias)) - bias[2]
    sigmoid = sum(softplus(x) for x in bias) - bias[2]
    assert (found.num_images, found.num_unlabeled) == (PER_CLASS, 2 * PER_CLASS)
    assert found.loss == pytest.approx(softmax if loss == "softmax" else sigmoid, rel=1e-6)


def test_softmax_takes_the_first_label_that_has_a_target(tmp_path: Path) -> None:
    url, bias = str(packed_with_weights(tmp_path, ["c0|c1,1|1", "c2,"])), (2.0, 0.0, 1.0)
    (found,) = run_ranks(mapped_scores, url, "softmax", bias, num_ranks=1)
    assert found.num_images == 1
    assert found.loss == pytest.approx(math.log(sum(math.exp(one) for one in bias)) - bias[2], rel=1e-6)


def mapped_scores(world: World, url: str, loss: LossName, bias: tuple[float, ...]) -> Scores:
    """Scores with a map that has one label."""
    data, labels = open_dataset(url), ("c0", "c1", "c2")
    return evaluate(
        biased(bias),
        data,
        EvaluationConfig(url=url, batch_size=4),
        labels=labels,
        loss=loss,
        world=world,
        targets=by_class_map(data, labels, {"c1": ["c2"]}),
    )[0]


def weighted_scores(world: World, url: str, loss: LossName, bias: tuple[float, ...]) -> tuple[Scores, Scores]:
    """Scores with weights, and without."""
    data, config, labels = open_dataset(url), EvaluationConfig(url=url, batch_size=3), ("c0", "c1", "c2")
    with_weights, without = (
        evaluate(biased(bias), data, config, labels=labels, loss=loss, world=world, label_weights=used)[0]
        for used in (True, False)
    )
    return with_weights, without


def batches_before_it_was_left(world: World, url: str, most: int) -> tuple[int, int]:
    """How many batches were read, and how many the model saw, by a caller that stops before this batch; all batches if
    it never stops."""
    num_read = num_seen = 0

    def leave(error: Exception | None) -> Callable[[], None]:
        nonlocal num_read
        assert error is None
        num_read += 1
        return partial(agree, num_read)

    def agree(num: int) -> None:
        if num > most:
            raise InterruptedError

    def see(*_: object) -> None:
        nonlocal num_seen
        num_seen += 1

    model = build_model(TINY)
    model.register_forward_pre_hook(see)
    with suppress(InterruptedError):
        evaluate(
            model,
            open_dataset(url),
            EvaluationConfig(batch_size=2),
            labels=("c0", "c1", "c2"),
            loss="softmax",
            world=world,
            before_batch=leave,
        )
    return num_read, num_seen


def test_an_evaluation_can_be_left_before_any_batch_and_every_rank_has_as_many(packed: str) -> None:
    most = NUM_SAMPLES
    assert run_ranks(batches_before_it_was_left, packed, most, num_ranks=2) == [(4, 4)] * 2  # of 4 samples, by two
    assert run_ranks(batches_before_it_was_left, packed, 1, num_ranks=2) == [(2, 1)] * 2


def test_only_our_own_models_are_evaluated() -> None:
    assert model_image_size(build_model(TINY)) == 8
    with pytest.raises(TypeError, match="Linear has no config"):
        model_image_size(torch.nn.Linear(2, 2))


def filled(num: int, *, ids: range = range(100), batch: int = 7) -> list[Example]:
    """100 images with the labels 0, 1, 2, 0, ..., of which the model says 1 with a confidence that grows with the id;
    every tenth has no label that counts."""
    examples = Examples(num)
    for first in range(ids.start, ids.stop, batch):
        some = np.arange(first, min(first + batch, ids.stop))
        targets_B1 = torch.from_numpy(np.where(some % 10 == 9, -1, some % 3))[:, None]
        logits_BK = torch.tensor([[0.0, 1.0, 0.0]]).repeat(len(some), 1)
        confidence_B = torch.from_numpy(some / 100)
        examples.add(
            torch.from_numpy(some),
            logits_BK,
            targets_B1,
            torch.from_numpy(some % 3)[:, None],
            confidence_B=confidence_B,
        )
    return examples.chosen()


def test_the_most_confident_mistakes_and_as_many_right_answers() -> None:
    found = filled(4)
    assert [one.is_right for one in found] == [True] * 4 + [False] * 4
    assert [one.sample_id for one in found[4:]] == [98, 96, 95, 93], "the most confident first; 99 has no target"
    assert all(one.said == 1 for one in found)
    assert all(one.labels == (one.sample_id % 3,) and (one.labels == (1,)) == one.is_right for one in found)
    assert filled(4, batch=100) == found, "whatever the batches"
    assert len({one.sample_id for one in found[:4]} - {1, 4, 7, 10}) > 0, "no beginning of the dataset"
    assert filled(0) == []
    assert len(filled(200)) == 90


def chosen(world: World, url: str, num: int) -> list[Example]:
    model = build_model(replace(TINY, num_classes=3))
    with torch.no_grad():
        model.head.weight.normal_(generator=torch.Generator().manual_seed(0))
    examples = Examples(num)
    evaluate(
        model,
        open_dataset(url),
        EvaluationConfig(batch_size=4),
        labels=("c0", "c1", "c2"),
        loss="softmax",
        world=world,
        examples=examples,
    )
    examples.over_ranks(world.device)
    return examples.chosen()


def test_any_number_of_ranks_chooses_the_same(packed: str) -> None:
    (alone,) = run_ranks(chosen, packed, 3, num_ranks=1)
    for ranks in run_ranks(chosen, packed, 3, num_ranks=2):
        assert [(one.sample_id, one.said, one.is_right) for one in ranks] == [
            (one.sample_id, one.said, one.is_right) for one in alone
        ]
    assert 0 < len(alone) <= 6
    assert len({one.sample_id for one in alone}) == len(alone)
    assert all(one.sample_id < NUM_SAMPLES for one in alone)


@pytest.mark.parametrize(("size", "kind"), [(32, "image/png"), (224, "image/jpeg")])
def test_pictures_are_what_the_model_sees(packed: str, size: int, kind: str) -> None:
    found = pictures(open_dataset(packed), [7, 2], image_size=size, transform=EvaluationTransform(), threads=1)
    assert [media for media, _ in found] == [kind] * 2
    images = [Image.open(io.BytesIO(data)) for _, data in found]
    assert [image.size for image in images] == [(min(size, 160),) * 2] * 2
    assert pictures(open_dataset(packed), [], image_size=size, transform=EvaluationTransform(), threads=1) == []
