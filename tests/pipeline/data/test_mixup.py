"""Labels and weights of a batch as matrices; mixup and CutMix give the same images and targets however a batch is cut.

CutMix is compared with the paper's formulas and timm's boxes.
"""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import special, stats

from pipeline.data.batches import Labels, label_matrix, weight_matrix
from pipeline.data.config import MixupConfig
from pipeline.data.mixup import draw_mix, mix_images, mix_targets, mix_weights
from pipeline.models import ModelConfig, build_model
from pipeline.models.loss import classification_loss, targets_of
from pipeline.training.zero.batch_plan import BatchPlan, plan_batch
from shards.errors import UserError
from shards.sample_rows import NO_WEIGHT

ALPHAS = (0.05, 0.2, 0.5, 0.8, 1.0)
FROZEN = {  # in 2 ** -16, at step 3, seed 7, pairs 0 to 5: a change here is another run, and needs a new MIXUP_VERSION
    0.2: (60_329, 64_541, 64_676, 62_825, 65_447, 61_774),
    1.0: (40_639, 55_230, 64_482, 52_415, 55_467, 49_397),
}
CUTMIX, BOTH = MixupConfig(cutmix_alpha=1.0), MixupConfig(alpha=0.8, cutmix_alpha=1.0)
SIZE = 20
IMAGES = torch.randint(0, 256, (24, SIZE, SIZE, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
TARGETS = torch.eye(24)
FROZEN_CUTMIX = ((0, 12, 4, 20), (2, 14, 8, 20), (10, 20, 13, 20))  # of seed 7, step 3: a change here is another run


def places(first: int, end: int) -> NDArray[np.int64]:
    return np.arange(first, end, dtype=np.int64)


@pytest.mark.parametrize("alpha", FROZEN)
def test_weights_never_change(alpha: float) -> None:
    weights = mix_weights(3, places(0, 12), seed=7, alpha=alpha)
    assert weights.dtype == np.float32
    assert tuple((65536 * weights[::2]).tolist()) == FROZEN[alpha]
    assert (weights[::2] == weights[1::2]).all()


@pytest.mark.parametrize("alpha", ALPHAS)
def test_weights_are_the_larger_side_of_a_beta(alpha: float) -> None:
    """Kolmogorov-Smirnov and two moments of 100,000 weights over steps; unfolded, they are Beta(alpha, alpha)."""
    weights = np.concatenate([mix_weights(step, places(0, 2000), seed=1, alpha=alpha)[::2] for step in range(100)])
    assert weights.min() >= 0.5
    assert weights.max() <= 1
    beta = stats.beta(alpha, alpha)

    def folded(weight: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.asarray(2 * beta.cdf(weight) - 1)

    # Weights are multiples of 2 ** -16, and a small alpha heaps them up at 1: there the steps themselves have a height.
    edges = np.linspace(0.5, 1, 200, endpoint=False) + 2.0**-17
    distance = np.abs((weights[:, None] <= edges).mean(axis=0) - folded(edges)).max()
    assert distance < 1.63 / np.sqrt(weights.size)  # 1 in 100
    from_half = weights.astype(np.float64) - 0.5
    assert (from_half**2).mean() == pytest.approx(beta.var(), rel=0.01)
    assert from_half.mean() == pytest.approx(1 / (alpha * special.beta(alpha, alpha) * 4**alpha), rel=0.01)


def test_weights_differ_by_seed_step_and_pair() -> None:
    rows = [mix_weights(step, places(0, 64), seed=seed, alpha=1.0)[::2] for seed in (0, 1) for step in (0, 1, 2)]
    assert np.unique(np.stack(rows)).size > 185  # of 192
    assert np.abs(np.corrcoef(np.stack(rows)) - np.eye(6)).max() < 0.55


def test_tiny_alpha_mixes_nothing() -> None:
    assert (mix_weights(0, places(0, 64), seed=0, alpha=1e-4) == 1).mean() > 0.95


def mixed_batch(images: torch.Tensor, targets: torch.Tensor, *, plan: BatchPlan) -> tuple[torch.Tensor, torch.Tensor]:
    """A global batch mixed in pieces, as the ranks of a plan do it."""
    starts = range(0, plan.global_batch + 1, plan.micro_batch)
    parts = []
    for first, end in pairwise(starts):
        weights = torch.from_numpy(mix_weights(11, places(first, end), seed=5, alpha=0.5))
        parts.append((mix_images(images[first:end], weights), mix_targets(targets[first:end], weights)))
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


def some_batch(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (count, 8, 8, 3), dtype=torch.uint8, generator=generator)
    return images, targets_of(torch.randint(-1, 5, (count, 2), generator=generator), 5, name="sigmoid")


@settings(max_examples=50)
@given(ranks=st.sampled_from([1, 2, 4, 8]), micro=st.sampled_from([2, 4, 6, 8, 12, 24, 48]))
def test_no_boundary_changes_a_bit(ranks: int, micro: int) -> None:
    images, targets = some_batch(48)
    whole = mixed_batch(images, targets, plan=plan_batch(48, micro_batch=0, num_ranks=1, lanes=1, pairs=True))
    share = 48 // ranks
    if share % micro == 0:
        plan = plan_batch(48, micro_batch=micro, num_ranks=ranks, lanes=1, pairs=True)
        cut = mixed_batch(images, targets, plan=plan)
        assert torch.equal(cut[0], whole[0])
        assert torch.equal(cut[1], whole[1])


def test_images_and_targets_are_mixed_exactly() -> None:
    """Against whole numbers: weights count 2 ** -16, so nothing is rounded."""
    images, targets = some_batch(16)
    weights = mix_weights(2, places(32, 48), seed=0, alpha=0.8)
    mixed = mix_images(images, torch.from_numpy(weights))
    assert (mixed.dtype, mixed.shape) == (torch.float32, images.shape)
    partner = np.arange(16) ^ 1
    parts = (65536 * weights).astype(np.int64)
    assert (parts / 65536 == weights).all()
    whole = images.numpy().astype(np.int64)
    expected = parts[:, None, None, None] * whole + (65536 - parts)[:, None, None, None] * whole[partner]
    assert (65536 * mixed.double() == torch.from_numpy(expected)).all()
    soft = mix_targets(targets, torch.from_numpy(weights)).numpy()
    assert np.allclose(soft, weights[:, None] * targets.numpy() + (1 - weights)[:, None] * targets.numpy()[partner])


def test_weights_of_one_and_a_half() -> None:
    images, targets = some_batch(4)
    ones, halves = torch.ones(4), torch.full((4,), 0.5)
    assert torch.equal(mix_images(images, ones), images.float())
    assert torch.equal(mix_targets(targets, ones), targets)
    assert torch.equal(mix_images(images, halves)[0], mix_images(images, halves)[1])


def test_the_model_takes_mixed_images_as_it_takes_bytes() -> None:
    """Unmixed images as fp32 from 0 to 255 give the same logits bit for bit, and a mixed batch trains."""
    model = build_model(
        ModelConfig(name="", image_size=8, num_classes=5, patch=4, depth=1, width=16, mlp_width=32, num_heads=2)
    )
    torch.nn.init.normal_(model.head.weight)  # zero at the start: every image would have the same logits
    images, targets = some_batch(4)
    assert torch.equal(model(images), model(mix_images(images, torch.ones(4))))
    weights = torch.from_numpy(mix_weights(0, places(0, 4), seed=0, alpha=0.5))
    loss = classification_loss(model(mix_images(images, weights)), mix_targets(targets, weights), name="sigmoid")
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    assert all(torch.isfinite(gradient).all() for gradient in gradients)


@pytest.mark.parametrize("alpha", [0.0, -0.1, 1.1, float("nan")])
def test_alphas(alpha: float) -> None:
    with pytest.raises(ValueError, match="alpha is"):
        mix_weights(0, places(0, 2), seed=0, alpha=alpha)
    if alpha != 0:
        with pytest.raises(UserError, match=r"data\.mixup\.alpha is .*; allowed: (0 \(off\) to 1|a finite)"):
            MixupConfig(alpha=alpha)
    assert MixupConfig().alpha == 0


def own_labels(*own: int) -> Labels:
    return np.array(own, dtype=np.int64), ()


def test_labels_are_padded_with_minus_one() -> None:
    single = np.array([4, 9, -1])  # the second is one of several
    assert label_matrix(single, {1: own_labels(1, 2, 3)}).tolist() == [[4, -1, -1], [1, 2, 3], [-1, -1, -1]]
    assert label_matrix(single, {1: own_labels()}).tolist() == [[4], [-1], [-1]]


def test_rows_without_weights_are_marked_and_others_padded_with_zero() -> None:
    others = {0: (own_labels(4, 5)[0], (0.5, 0.25)), 1: own_labels(1, 2, 3)}
    none = [NO_WEIGHT] * 3
    assert weight_matrix(np.array([4, 1, -1]), others).tolist() == [[0.5, 0.25, 0.0], none, none]
    assert weight_matrix(np.array([-1]), {}).tolist() == [[NO_WEIGHT]]


def boxes_of(config: MixupConfig, *, num_steps: int = 60) -> NDArray[np.int64]:
    """Of images of 224 px."""
    drawn = [draw_mix(step, places(0, 400), seed=1, config=config, image_size=224).boxes for step in range(num_steps)]
    return np.concatenate([boxes[::2] for boxes in drawn if boxes is not None])


def test_boxes_never_change() -> None:
    mix = draw_mix(3, places(0, 6), seed=7, config=CUTMIX, image_size=SIZE)
    assert mix.boxes is not None
    assert tuple(map(tuple, mix.boxes[::2].tolist())) == FROZEN_CUTMIX
    assert (mix.boxes[::2] == mix.boxes[1::2]).all()


def test_boxes_are_those_of_a_uniform_area_around_a_uniform_point() -> None:
    """Of a box that no edge cuts off, the sides are S sqrt(1 - a), a uniform: side ** 2 / S ** 2 is, below 1/4."""
    top, bottom, left, right = boxes_of(CUTMIX).T
    is_whole = (top > 0) & (bottom < 224) & (left > 0) & (right < 224)
    assert (bottom - top == right - left)[is_whole].all()
    assert ((bottom - top) % 2 == 0)[is_whole].all()
    inside = is_whole & (bottom - top < 112)
    middle = (top + bottom)[inside] / 2
    in_reach = (middle > 56) & (middle < 168)
    assert stats.kstest(middle[in_reach], stats.uniform(56, 112).cdf).pvalue > 1e-3
    # Mean area of the boxes as timm cuts them: that of 200,000 drawn by NumPy.
    rng = np.random.default_rng(0)
    half = (224 * np.sqrt(1 - rng.random(200_000))).astype(int) // 2
    rows, columns = rng.integers(0, 224, (2, 200_000))
    heights, widths = (np.clip(at + half, 0, 224) - np.clip(at - half, 0, 224) for at in (rows, columns))
    assert ((bottom - top) * (right - left)).mean() == pytest.approx((heights * widths).mean(), rel=0.02)


def test_images_and_targets_are_numpys() -> None:
    mix = draw_mix(5, places(0, 24), seed=2, config=BOTH, image_size=SIZE)
    assert mix.boxes is not None
    assert mix.weights is not None
    mixed, targets = mix.on().images(IMAGES).numpy(), mix.on().targets(TARGETS, is_binary=False).numpy()
    num_cut = 0
    for number in range(24):
        own, other = IMAGES[number].numpy().astype(np.float32), IMAGES[number ^ 1].numpy().astype(np.float32)
        top, bottom, left, right = mix.boxes[number]
        expected, share = own.copy(), 1 - (bottom - top) * (right - left) / SIZE**2
        expected[top:bottom, left:right] = other[top:bottom, left:right]
        if mix.weights[number] < 1:
            share = mix_weights(5, places(0, 24), seed=2, alpha=0.8)[number]
            expected = share * own + (1 - share) * other
        else:
            num_cut += 1
        np.testing.assert_array_equal(mixed[number], expected)
        assert targets[number, number] == pytest.approx(share)
        assert targets[number, number ^ 1] == pytest.approx(1 - share)
        assert targets[number].sum() == pytest.approx(1)
    assert 4 <= num_cut <= 20, "each pair has either, with equal chances"


def test_binary_targets_are_all_labels_of_both() -> None:
    mix = draw_mix(5, places(0, 24), seed=2, config=BOTH, image_size=SIZE)
    found = mix.on().targets(TARGETS, is_binary=True)
    assert set(found.flatten().tolist()) == {0.0, 1.0}
    weighted = mix.on().targets(TARGETS, is_binary=False)
    assert torch.equal(found, (weighted > 0).float()), "deit's engine.py: targets.gt(0.0)"
    assert found.sum() > 40


@pytest.mark.parametrize("config", [CUTMIX, BOTH], ids=["CutMix", "both"])
def test_a_mix_is_the_same_however_a_batch_is_cut(config: MixupConfig) -> None:
    def mixed(size: int) -> torch.Tensor:
        starts = range(0, 24, size)
        drawn = [draw_mix(7, places(at, at + size), seed=1, config=config, image_size=SIZE).on() for at in starts]
        return torch.cat([mix.images(IMAGES[at : at + size]) for at, mix in zip(starts, drawn, strict=True)])

    assert torch.equal(mixed(24), mixed(2))
    assert torch.equal(mixed(24), mixed(12))
    assert mixed(24).dtype == (torch.uint8 if config == CUTMIX else torch.float32)


def test_mixup_alone_is_what_it_was() -> None:
    mix = draw_mix(7, places(0, 24), seed=1, config=MixupConfig(alpha=0.8), image_size=SIZE)
    weights = mix_weights(7, places(0, 24), seed=1, alpha=0.8)
    assert mix.boxes is None
    assert np.array_equal(mix.shares, weights)
    assert torch.equal(mix.on().images(IMAGES), mix_images(IMAGES, torch.from_numpy(weights)))


def test_half_of_the_pairs_get_cutmix_beside_mixup() -> None:
    boxes = boxes_of(BOTH)
    assert (boxes.any(axis=1)).mean() == pytest.approx(0.5, abs=0.02)
