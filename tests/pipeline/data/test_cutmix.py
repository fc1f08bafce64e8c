"""CutMix against the paper's formulas and timm's boxes, and the same mix however a batch is cut."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats

from pipeline.data.config import MixupConfig
from pipeline.data.cutmix import draw_mix
from pipeline.data.mixup import mix_images, mix_weights
from shards.errors import UserError

CUTMIX, BOTH = MixupConfig(cutmix_alpha=1.0), MixupConfig(alpha=0.8, cutmix_alpha=1.0)
SIZE = 20
IMAGES = torch.randint(0, 256, (24, SIZE, SIZE, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
TARGETS = torch.eye(24)
FROZEN = ((0, 12, 4, 20), (2, 14, 8, 20), (10, 20, 13, 20))  # of seed 7, step 3: a change here is another run


def places(first: int, end: int) -> NDArray[np.int64]:
    return np.arange(first, end, dtype=np.int64)


def boxes_of(config: MixupConfig, *, num_steps: int = 60) -> NDArray[np.int64]:
    """Of images of 224 px."""
    drawn = [draw_mix(step, places(0, 400), seed=1, config=config, image_size=224).boxes for step in range(num_steps)]
    return np.concatenate([boxes[::2] for boxes in drawn if boxes is not None])


def test_boxes_never_change() -> None:
    mix = draw_mix(3, places(0, 6), seed=7, config=CUTMIX, image_size=SIZE)
    assert mix.boxes is not None
    assert tuple(map(tuple, mix.boxes[::2].tolist())) == FROZEN
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


def test_a_split_pair_is_refused() -> None:
    with pytest.raises(ValueError, match="not whole pairs"):
        draw_mix(0, places(1, 3), seed=0, config=CUTMIX, image_size=SIZE)


def test_binary_targets_without_mixing_are_the_users_mistake() -> None:
    with pytest.raises(UserError, match=r"binary_targets is on without mixup.*--data\.mixup\.no-binary-targets"):
        MixupConfig(binary_targets=True)
