"""3-Augment and colour jitter against Pillow's operations and against their formulas, and their random numbers."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

from pipeline.data.augment import recoloured
from pipeline.data.config import COLOUR_DRAWS, AugmentConfig, DataConfig
from pipeline.data.stream import train_batches
from tests.rigs.datasets import packed_folders

THREE, JITTER = AugmentConfig(three_augment=True), AugmentConfig(color_jitter=0.3)
BOTH = AugmentConfig(three_augment=True, color_jitter=0.3)
GREY, SOLARIZED, BLURRED = 0.1, 0.5, 0.9  # the first draw


def picture() -> NDArray[np.uint8]:
    return np.random.default_rng(3).integers(0, 256, size=(40, 50, 3), dtype=np.uint8)


def drawn(
    choice: float, radius: float = 0.0, order: float = 0.0, factors: tuple[float, ...] = (0.5, 0.5, 0.5)
) -> NDArray[np.float64]:
    return np.array([choice, radius, order, *factors])


def test_grey_is_the_luma_in_all_channels() -> None:
    found = recoloured(picture(), drawn(GREY), config=THREE)
    luma = np.asarray(Image.fromarray(picture()).convert("L"))
    np.testing.assert_array_equal(found, np.stack([luma] * 3, axis=2))
    exact = picture() @ np.array([0.299, 0.587, 0.114])
    assert np.abs(found - exact[:, :, None]).max() <= 0.51


def test_solarizing_inverts_from_128_on() -> None:
    found, before = recoloured(picture(), drawn(SOLARIZED), config=THREE), picture()
    np.testing.assert_array_equal(found, np.where(before < 128, before, 255 - before))
    np.testing.assert_array_equal(found, np.asarray(ImageOps.solarize(Image.fromarray(before))))


@pytest.mark.parametrize(("draw", "radius"), [(0.0, 0.1), (0.5, 1.05), (1 - 2**-53, 2.0)])
def test_blurring_is_pillows_with_a_radius_of_up_to_2(draw: float, radius: float) -> None:
    found = recoloured(picture(), drawn(BLURRED, draw), config=THREE)
    expected = Image.fromarray(picture()).filter(ImageFilter.GaussianBlur(radius))
    assert np.abs(found.astype(int) - np.asarray(expected)).max() <= 1, "its radius may differ in the last bit"
    assert (np.ptp(found) < np.ptp(picture())) == (radius > 1)


@pytest.mark.parametrize("place", range(6))
def test_jitter_is_pillows_enhancers_in_any_order(place: int) -> None:
    names = [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)][place]
    factors = (0.7, 1.3, 1.15)
    draws = drawn(GREY, order=(place + 0.5) / 6, factors=(0.0, 1.0, 0.75))
    image = Image.fromarray(picture())
    for number in names:
        kind = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)[number]
        image = kind(image).enhance(factors[number])
    found = recoloured(picture(), draws, config=JITTER)
    assert np.abs(found.astype(int) - np.asarray(image)).max() <= 1, "its factors may differ in the last bit"


def test_brightness_is_a_factor_and_nothing_else_changes_in_the_middle() -> None:
    found = recoloured(picture(), drawn(GREY, factors=(0.0, 0.5, 0.5)), config=JITTER)
    assert np.abs(found - 0.7 * picture()).max() <= 1


def test_both_are_the_one_after_the_other() -> None:
    draws = drawn(BLURRED, 0.3, 0.2, (0.1, 0.6, 0.9))
    expected = recoloured(recoloured(picture(), draws, config=THREE), draws, config=JITTER)
    np.testing.assert_array_equal(recoloured(picture(), draws, config=BOTH), expected)


def test_draws_are_as_many_as_are_needed() -> None:
    assert [one.num_colour_draws for one in (AugmentConfig(), THREE, JITTER)] == [0, COLOUR_DRAWS, COLOUR_DRAWS]
    with pytest.raises(ValueError, match="not \\(6,\\)"):
        recoloured(picture(), np.zeros(5), config=THREE)


def test_batches_have_a_third_of_each_and_the_same_on_any_ranks(tmp_path: Path) -> None:
    """Noise has no grey image, and its values reach both ends unless it is blurred."""
    url = packed_folders(tmp_path, num_classes=3, images_a_class=40)
    plain = AugmentConfig(crop="none", flip=False)
    config = DataConfig(url=str(url), lanes=4, window_blocks=2, augment=replace(plain, three_augment=True))

    def images(num_ranks: int, how: DataConfig = config) -> dict[int, NDArray[np.uint8]]:
        found: dict[int, NDArray[np.uint8]] = {}
        for rank in range(num_ranks):
            with train_batches(global_batch=120, image_size=24, config=how, rank=rank, num_ranks=num_ranks) as batches:
                batch = next(batches)
                found |= {int(i): image.copy() for i, image in zip(batch.sample_ids, batch.images.numpy(), strict=True)}
        return found

    before, one, two = images(1, replace(config, augment=plain)), images(1), images(2)
    assert len(one) == 120
    assert all(np.array_equal(one[number], two[number]) for number in one)
    kinds = [0, 0, 0]
    for number, image in one.items():
        is_grey = bool((image == image[:, :, :1]).all())
        is_solarized = bool((image == np.where(before[number] < 128, before[number], 255 - before[number])).all())
        kinds[0 if is_grey else 1 if is_solarized else 2] += 1
    assert min(kinds) > 25, kinds
