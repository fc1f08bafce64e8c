"""Few-shot accuracy: representations are those of the forward pass, and shots never change, for any number of ranks."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.data.config import Share
from pipeline.data.evaluation import evaluation_batches
from pipeline.evaluation.config import FewshotConfig, FewshotInTraining
from pipeline.evaluation.fewshot import (
    FewshotScores,
    Represented,
    before_head,
    chosen_data,
    chosen_shots,
    features_of,
    mean_and_deviation,
    measured,
    represented,
)
from pipeline.models import ModelConfig, ViT, build_model
from pipeline.models.build import Model
from pipeline.ranks.world import World
from pipeline.shared_settings import EvaluationTransform
from shards.dataset import open_dataset
from shards.errors import UserError
from shards.part import labels_of
from tests.rigs.datasets import packed_folders
from tests.rigs.processes import run_ranks

TOKEN_SIZES: dict[str, Any] = {"depth": 1, "width": 16, "mlp_width": 16, "num_heads": 2}
FIELDS: dict[str, Any] = {"image_size": 8, "patch": 4, "depth": 1, "width": 8, "mlp_width": 8, "num_heads": 2}
IDS = [7, 0, 3, 4, 14]
MODELS: dict[str, dict[str, Any]] = {
    "class token": {},
    "mean": {"pooling": "average"},
    "hidden layer": {"representation": True},
    "masked patches": {"masked_patches": True, "num_classes": 512},
}
CPU = torch.device("cpu")
TINY = ModelConfig(name="vit", image_size=8, patch=4, depth=1, width=8, mlp_width=8, num_heads=2, num_classes=3)
EXPECTED = [[28, 8, 12], [9, 13, 17]]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(packed_folders(tmp_path_factory.mktemp("features"), num_classes=3, images_a_class=5))


def model_of(kind: str) -> Model:
    model = build_model(ModelConfig(**{"name": "vit", "num_classes": 3, **FIELDS, **MODELS[kind]}))
    with torch.no_grad():
        model.head.weight.copy_(torch.eye(*model.head.weight.shape))  # logits are the first features
    return model.eval()


def features(world: World, url: str, kind: str) -> torch.Tensor:
    ids = np.array(IDS)
    return features_of(
        model_of(kind), open_dataset(url), ids, transform=EvaluationTransform(), batch_size=2, world=world
    )


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("kind", MODELS)
def test_the_head_makes_the_logits_of_them(packed: str, kind: str, num_ranks: int) -> None:
    found, *others = run_ranks(features, packed, kind, num_ranks=num_ranks)
    assert (found.shape, found.dtype) == ((5, 8), torch.float32)
    assert [rest.numel() for rest in others] == [0] * (num_ranks - 1)
    share = Share(global_batch=15, rank=0, num_ranks=1)
    batches = evaluation_batches(
        open_dataset(packed), batch_size=15, image_size=8, transform=EvaluationTransform(), share=share, threads=1
    )
    with torch.no_grad():
        logits = model_of(kind)(next(batches)[0].images[IDS])
    if kind == "masked patches":
        assert logits.shape == (5, 4, 512)
        logits = logits.mean(dim=1)
    assert torch.allclose(found[:, :3], logits[:, :3], atol=1e-5)
    assert len(set(found[:, 0].tolist())) == 5


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Training split of 3 classes with 7 images each, and a test split of the first 2 with 3."""
    folder = tmp_path_factory.mktemp("fewshot")
    for name in ("train", "test"):
        (folder / name).mkdir()
    train = packed_folders(folder / "train", num_classes=3, images_a_class=7)
    return str(train), str(packed_folders(folder / "test", num_classes=2, images_a_class=3))


def test_with_a_distillation_token_the_mean_of_both_tokens_is_represented() -> None:
    config = ModelConfig(name="vit", patch=8, image_size=16, num_classes=3, distillation_token=True, **TOKEN_SIZES)
    model = build_model(config)
    images = torch.randint(0, 256, (2, 16, 16, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert isinstance(model, ViT)
    with torch.no_grad():
        found, logits = before_head(model, images)
        assert torch.equal(found, model.features(images))
        assert torch.equal(logits, model(images))


def test_classes_that_lie_apart_are_told_apart() -> None:
    generator = torch.Generator().manual_seed(0)
    centres_KD = 10 * torch.eye(4, 6)
    shots = centres_KD[None, :, None] + torch.randn(3, 4, 5, 6, generator=generator)
    found = Represented(shots=shots, test=centres_KD.repeat(2, 1), test_labels=torch.arange(4).repeat(2))
    scores = measured(found, FewshotConfig(shots=(5, 1), probe=True), device=CPU)
    assert (scores.num_classes, scores.num_test_images, scores.width) == (4, 8, 6)
    assert [one.shots for one in scores.results] == [5, 1]
    assert scores.results[0].ridge == scores.results[0].probe == (1.0, 1.0, 1.0)
    assert len(scores.results[1].probe_l2) == 3


def test_without_labels_in_the_features_accuracy_is_chance() -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(4).repeat(250)
    found = Represented(
        shots=torch.randn(3, 4, 5, 6, generator=generator),
        test=torch.randn(1000, 6, generator=generator),
        test_labels=labels,
    )
    (result,) = measured(found, FewshotConfig(shots=(5,)), device=CPU).results
    assert mean_and_deviation(result.ridge)[0] == pytest.approx(0.25, abs=0.06)
    assert result.probe == result.probe_l2 == ()


def test_mean_and_deviation() -> None:
    assert mean_and_deviation((0.1, 0.3)) == pytest.approx((0.2, 0.02**0.5))
    assert mean_and_deviation((0.4,)) == (0.4, 0.0)


def of_dataset(world: World, train: str, test: str) -> tuple[FewshotScores | None, Represented | None]:
    config = FewshotConfig(shots=(1, 4), seeds=2)
    data = chosen_data(open_dataset(train), open_dataset(test), config)
    model = build_model(TINY).eval()
    found = represented(model, data, transform=EvaluationTransform(), batch_size=4, world=world)
    return (measured(found, config, device=world.device), found) if found else (None, None)


def test_ranks_share_the_images_and_change_no_score(urls: tuple[str, str]) -> None:
    ((one, alone),) = run_ranks(of_dataset, *urls, num_ranks=1)
    (two, shared), nothing = run_ranks(of_dataset, *urls, num_ranks=2)
    assert nothing == (None, None)
    assert one == two
    assert torch.allclose(alone.shots, shared.shots, atol=1e-6)
    assert alone.shots.shape == (2, 3, 4, 8)
    assert alone.test_labels.tolist() == labels_of(open_dataset(urls[1]), what="it").tolist()


def test_the_shots_are_those_of_each_seed(urls: tuple[str, str]) -> None:
    train, test = map(open_dataset, urls)
    data = chosen_data(train, test, FewshotConfig(shots=(2, 3), seeds=2))
    expected = [chosen_shots(labels_of(train, what="it"), num_classes=3, shots=3, seed=seed) for seed in range(2)]
    assert all(np.array_equal(one, other) for one, other in zip(data.shots, expected, strict=True))
    assert data.train_ids.tolist() == sorted({int(one) for ids in expected for one in ids.ravel()})


def test_more_shots_than_images_are_refused(urls: tuple[str, str]) -> None:
    with pytest.raises(UserError, match=r"has 7 images of class 'c0', fewer than --shots 25 .*at most 7 here"):
        chosen_data(open_dataset(urls[0]), open_dataset(urls[1]), FewshotConfig())
    with pytest.raises(UserError, match=r"fewer than --fewshot.shots 500"):
        chosen_data(open_dataset(urls[0]), open_dataset(urls[1]), FewshotInTraining(shots=(500,)))


def test_classes_without_training_images_are_refused(urls: tuple[str, str]) -> None:
    train, test = urls
    with pytest.raises(UserError, match=r"has 1 classes that .* lacks, for example 'c2'; give the two splits"):
        chosen_data(open_dataset(test), open_dataset(train), FewshotConfig(shots=(1,)))


def test_real_digits_need_few_shots(digits_url: str) -> None:
    """Pixels, by a random projection: far above chance, and better with more shots."""
    data = chosen_data(open_dataset(digits_url), open_dataset(digits_url), FewshotConfig(shots=(1, 25)))
    rows = run_ranks(digit_scores, digits_url, num_ranks=1)[0]
    assert data.test_labels.size == 1438
    assert 0.14 < rows[0] < rows[1] - 0.1


def digit_scores(world: World, url: str) -> list[float]:
    config = FewshotConfig(shots=(1, 25))
    data = chosen_data(open_dataset(url), open_dataset(url), config)
    model = build_model(
        ModelConfig(name="vit", image_size=16, patch=4, depth=1, width=64, mlp_width=64, num_heads=2, num_classes=10)
    ).eval()
    found = represented(model, data, transform=EvaluationTransform(), batch_size=100, world=world)
    assert found is not None
    return [mean_and_deviation(one.ridge)[0] for one in measured(found, config, device=CPU).results]


@given(seed=st.integers(0, 2**32), num_classes=st.integers(1, 7), more=st.integers(0, 9))
def test_few_shots_are_among_more_shots(seed: int, num_classes: int, more: int) -> None:
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(num_classes), 10 + more))
    ten = chosen_shots(labels, num_classes=num_classes, shots=10, seed=seed)
    assert ten.shape == (num_classes, 10)
    assert np.unique(ten).size == ten.size
    assert (labels[ten] == np.arange(num_classes)[:, None]).all()
    assert np.array_equal(chosen_shots(labels, num_classes=num_classes, shots=5, seed=seed), ten[:, :5])


def test_the_choice_of_shots_never_changes() -> None:
    labels = np.arange(40) % 2
    assert chosen_shots(labels, num_classes=2, shots=3, seed=0).tolist() == EXPECTED
    assert chosen_shots(labels, num_classes=2, shots=3, seed=1).tolist() != EXPECTED


def test_every_image_is_chosen_equally_often() -> None:
    labels = np.zeros(20, dtype=np.int64)
    chosen = [chosen_shots(labels, num_classes=1, shots=5, seed=seed) for seed in range(2000)]
    nums = np.bincount(np.concatenate(chosen, axis=None), minlength=20)  # 500 each, deviation 19
    assert 410 < nums.min() < nums.max() < 590
