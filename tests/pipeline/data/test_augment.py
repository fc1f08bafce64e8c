"""Crops lie inside the image and inside their bounds, and depend on (seed, epoch, sample) alone."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from pipeline.data.augment import (
    Crop,
    Viewport,
    draw_crop,
    draws_of,
    evaluation_viewport,
    short_side_resized,
    training_viewport,
)
from pipeline.data.config import AugmentConfig
from pipeline.data.transform import evaluation_view_of_pixels
from pipeline.data.window_resize import show
from pipeline.shared_settings import EvaluationTransform
from tests.pipeline.models.parity import imported

PLAIN = (
    AugmentConfig(),
    AugmentConfig(min_area=0.75, min_ratio=0.9, max_ratio=1.11, flip=False),
    AugmentConfig(min_area=0.3, max_area=0.4, min_ratio=1.0, max_ratio=2.0),
)
CONFIGS = (*PLAIN, *(replace(config, crop="random_resized") for config in PLAIN))


def noise(seed: int, height: int, width: int) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, size=(height, width, 3), dtype=np.uint8)


def one_draw(seed: int) -> NDArray[np.float64]:
    draws: NDArray[np.float64] = draws_of(np.array([seed]), np.array([0]), seed=1)[0]
    return draws


def largest_centred(height: int, width: int, config: AugmentConfig) -> tuple[int, int, int, int]:
    """The crop of an image in which no try fits: (top, left, height, width)."""
    w = min(width, max(1, round(height * config.max_ratio)))
    h = min(height, max(1, round(width / config.min_ratio)))
    return (height - h) // 2, (width - w) // 2, h, w


@settings(max_examples=300)
@given(
    height=st.integers(1, 700),
    width=st.integers(1, 700),
    sample=st.integers(0, 2**40),
    config=st.sampled_from(CONFIGS),
)
def test_crops_stay_inside_the_image_and_their_bounds(
    height: int, width: int, sample: int, config: AugmentConfig
) -> None:
    crop = draw_crop(height, width, one_draw(sample), config=config)
    assert 0 <= crop.top <= crop.top + crop.height <= height
    assert 0 <= crop.left <= crop.left + crop.width <= width
    assert crop.height > 0
    assert crop.width > 0
    box = crop.top, crop.left, crop.height, crop.width
    if box == ((0, 0, height, width) if config.crop == "inception" else largest_centred(height, width, config)):
        return  # no try fits
    # Sides are rounded to pixels: somewhere within half a pixel the bounds are met.
    assert (crop.height + 0.5) * (crop.width + 0.5) >= config.min_area * height * width
    assert (crop.height - 0.5) * (crop.width - 0.5) <= config.max_area * height * width
    assert (crop.width + 0.5) / max(crop.height - 0.5, 1e-9) >= config.min_ratio
    assert (crop.width - 0.5) / (crop.height + 0.5) <= config.max_ratio


@pytest.mark.parametrize(
    ("height", "width", "expected"),
    [
        pytest.param(10, 1000, (0, 493, 10, 13), id="a strip: ratio 4/3 from its middle"),
        pytest.param(1000, 12, (492, 0, 16, 12), id="a tall strip: ratio 3/4 from its middle"),
    ],
)
def test_where_no_try_fits_the_largest_centred_crop_is_taken(
    height: int, width: int, expected: tuple[int, int, int, int]
) -> None:
    config = AugmentConfig(min_area=0.5)
    for sample in range(20):
        crop = draw_crop(height, width, one_draw(sample), config=replace(config, crop="random_resized"))
        assert (crop.top, crop.left, crop.height, crop.width) == expected
        crop = draw_crop(height, width, one_draw(sample), config=config)
        assert (crop.top, crop.left, crop.height, crop.width) == (0, 0, height, width), "TensorFlow takes it all"


@pytest.mark.parametrize(
    ("crop", "mean", "quartiles"),
    [
        pytest.param("inception", 0.340, (0.145, 0.295, 0.500), id="as TensorFlow's kernel draws, simulated apart"),
        pytest.param("random_resized", 0.417, (0.228, 0.403, 0.584), id="as torchvision draws, simulated apart"),
    ],
)
def test_the_two_crops_have_their_own_areas(
    crop: Literal["inception", "random_resized"], mean: float, quartiles: tuple[float, ...]
) -> None:
    draws = draws_of(np.arange(8000), np.zeros(8000, dtype=np.int64), seed=6)
    crops = [draw_crop(375, 500, row, config=AugmentConfig(crop=crop)) for row in draws]
    areas = np.array([one.height * one.width for one in crops]) / (375 * 500)
    assert areas.mean() == pytest.approx(mean, abs=0.012)
    assert np.quantile(areas, (0.25, 0.5, 0.75)) == pytest.approx(quartiles, abs=0.02)


def test_the_inception_crops_ratio_and_height_are_uniform() -> None:
    """Where nothing is cut: the height lies evenly between those that the smallest and largest area need."""
    config = AugmentConfig(min_area=0.05, max_area=0.3)
    draws = draws_of(np.arange(8000), np.zeros(8000, dtype=np.int64), seed=7)
    crops = [draw_crop(1000, 1000, row, config=config) for row in draws]
    ratios = np.array([crop.width / crop.height for crop in crops])
    low, high = (np.sqrt(area * 1e6 / ratios) for area in (0.05, 0.3))
    places = (np.array([crop.height for crop in crops]) - low) / (high - low)
    for found, start, end in ((ratios, 3 / 4, 4 / 3), (places, 0.0, 1.0)):
        assert np.quantile(found, (0.25, 0.5, 0.75)) == pytest.approx(
            [start + (end - start) * q for q in (0.25, 0.5, 0.75)], abs=0.02
        )


def test_areas_ratios_places_and_flips_are_spread_over_their_ranges() -> None:
    draws = draws_of(np.arange(4000), np.zeros(4000, dtype=np.int64), seed=5)
    crops = [draw_crop(1000, 1000, row, config=AugmentConfig(crop="random_resized")) for row in draws]
    areas = np.array([crop.height * crop.width / 1e6 for crop in crops])
    ratios = np.array([crop.width / crop.height for crop in crops])
    assert areas.min() == pytest.approx(0.05, abs=0.01)
    assert areas.max() > 0.95
    assert np.abs(np.log(ratios)).max() == pytest.approx(np.log(4 / 3), abs=0.01)
    assert np.log(ratios).mean() == pytest.approx(0, abs=0.02)
    assert np.mean([crop.flip for crop in crops]) == pytest.approx(0.5, abs=0.03)
    tops = np.array([crop.top / (1000 - crop.height) for crop in crops if crop.height < 900])
    assert tops.mean() == pytest.approx(0.5, abs=0.03)


def test_no_flip_and_no_crop_where_the_configuration_says_so() -> None:
    config = AugmentConfig(crop="none", flip=False)
    for sample in range(20):
        crop = draw_crop(9, 14, one_draw(sample), config=config)
        assert crop == Crop(top=0, left=0, height=9, width=14, flip=False)


@settings(max_examples=40)
@given(data=st.data(), seed=st.integers(0, 2**40))
def test_draws_do_not_depend_on_who_else_is_in_the_batch(data: st.DataObject, seed: int) -> None:
    ids = np.array(data.draw(st.lists(st.integers(0, 2**40), min_size=1, max_size=12)))
    epochs = np.array(data.draw(st.lists(st.integers(0, 3), min_size=ids.size, max_size=ids.size)))
    chosen = np.array(data.draw(st.permutations(range(ids.size))))[: data.draw(st.integers(1, ids.size))]
    together = draws_of(ids, epochs, seed=seed)
    np.testing.assert_array_equal(draws_of(ids[chosen], epochs[chosen], seed=seed), together[chosen])
    assert 0 <= together.min() <= together.max() < 1


def test_draws_differ_by_seed_epoch_and_sample() -> None:
    rows = [
        draws_of(np.array([sample]), np.array([epoch]), seed=seed)[0]
        for sample in (0, 1)
        for epoch in (0, 1)
        for seed in (0, 1)
    ]
    for index, row in enumerate(rows):
        for other in rows[:index]:
            assert not np.intersect1d(row, other).size


SIZES = (
    pytest.param((40, 60), (224, 224), id="larger"),
    pytest.param((300, 200), (64, 64), id="much smaller"),
    pytest.param((64, 64), (32, 32), id="exactly half"),
    pytest.param((33, 57), (32, 48), id="a little smaller"),
    pytest.param((200, 20), (50, 50), id="lower and broader"),
    pytest.param((20, 200), (50, 50), id="taller and narrower"),
    pytest.param((1, 5), (16, 16), id="a single line"),
    pytest.param((17, 17), (17, 17), id="the same"),
)


def shown(pixels: NDArray[np.uint8], size: tuple[int, int], *, is_antialiased: bool) -> NDArray[np.uint8]:
    out = np.zeros((*size, 3), dtype=np.uint8)
    show(pixels, Viewport(height=size[0], width=size[1], is_antialiased=is_antialiased), out=out)
    return out


@pytest.mark.parametrize(("from_size", "to_size"), SIZES)
def test_the_plain_resize_is_torchs_bilinear(from_size: tuple[int, int], to_size: tuple[int, int]) -> None:
    """Within one grey level, on noise, which is the hardest; an eighth of one darker on average (lighter at a half)."""
    pixels = noise(7, *from_size)
    planes = torch.from_numpy(pixels).permute(2, 0, 1)[None].float()
    expected = F.interpolate(planes, size=to_size, mode="bilinear", align_corners=False, antialias=False)
    difference = shown(pixels, to_size, is_antialiased=False) - expected[0].permute(1, 2, 0).numpy()
    assert np.abs(difference).max() <= 1.0
    assert np.abs(difference.mean()) < 0.2
    assert np.abs(difference).mean() < 0.35


@pytest.mark.parametrize(("from_size", "to_size"), SIZES)
def test_the_antialiased_resize_is_pillows(from_size: tuple[int, int], to_size: tuple[int, int]) -> None:
    """To the bit, up to Pillow 12; where it resizes the height first, as later ones may, within one grey level."""
    pixels = noise(7, *from_size)
    height_first = from_size[0] * to_size[1] > from_size[1] * to_size[0]
    expected = np.asarray(Image.fromarray(pixels).resize(to_size[::-1], Image.Resampling.BILINEAR))
    difference = shown(pixels, to_size, is_antialiased=True).astype(int) - expected
    assert np.abs(difference).max() <= (1 if height_first else 0)


@pytest.mark.parametrize("is_antialiased", [False, True])
def test_a_window_is_cut_from_the_whole_resized_crop_and_mirrored(is_antialiased: bool) -> None:
    pixels, out = noise(8, 40, 50), np.zeros((2, 16, 12, 3), dtype=np.uint8)
    viewport = Viewport(height=30, width=20, top=9, left=5, is_antialiased=is_antialiased)
    show(pixels, viewport, out=out[0])
    show(pixels[:, ::-1], viewport, out=out[1])  # a turned image is a view like this
    whole, turned = (shown(part, (30, 20), is_antialiased=is_antialiased) for part in (pixels, pixels[:, ::-1]))
    np.testing.assert_array_equal(out[0], whole[9:25, 5:17])
    np.testing.assert_array_equal(out[1], turned[9:25, 5:17])
    show(pixels, replace(viewport, is_mirrored=True), out=out[1])
    np.testing.assert_array_equal(out[1], out[0][:, ::-1])


@pytest.mark.parametrize(
    ("size", "transform", "expected"),  # resized height and width, top and left of the cut
    [
        pytest.param((100, 50), EvaluationTransform(mode="resize"), (56, 56, 0, 0), id="straight to the size"),
        pytest.param((100, 50), EvaluationTransform(mode="central_crop"), (128, 64, 36, 4), id="56 x 256/224 = 64"),
        pytest.param((50, 100), EvaluationTransform(mode="central_crop"), (64, 128, 4, 36), id="a broad image"),
        pytest.param(
            (100, 50),
            EvaluationTransform(mode="central_crop", short_side=80),
            (160, 80, 52, 12),
            id="a short side of one's own",
        ),
        pytest.param(
            (20, 20),
            EvaluationTransform(mode="central_crop", short_side=10),
            (56, 56, 0, 0),
            id="never smaller than the model's size",
        ),
        pytest.param(
            (100, 200),
            EvaluationTransform(mode="central_crop", short_side=10),
            (56, 112, 0, 28),
            id="and never distorted",
        ),
        pytest.param((100, 50), EvaluationTransform(mode="fewshot"), (64, 64, 4, 4), id="the centre of a square"),
        pytest.param(
            (100, 50), EvaluationTransform(mode="fewshot", short_side=80), (80, 80, 12, 12), id="of another square"
        ),
    ],
)
def test_evaluation_windows(
    size: tuple[int, int], transform: EvaluationTransform, expected: tuple[int, int, int, int]
) -> None:
    height, width, top, left = expected
    viewport = Viewport(height=height, width=width, top=top, left=left)
    is_cut_off = transform.mode == "fewshot"
    assert evaluation_viewport(*size, transform, size=56) == replace(viewport, is_cut_off=is_cut_off)
    antialiased = replace(viewport, is_antialiased=True)
    assert evaluation_viewport(*size, replace(transform, antialias=True), size=56) == antialiased
    area = replace(viewport, is_area=True)
    assert evaluation_viewport(*size, replace(transform, filter="area"), size=56) == area


def cut_off(pixels: NDArray[np.uint8], side: int) -> NDArray[np.uint8]:
    """`resize(side)` of big_vision's pp/ops_image.py: TensorFlow's bilinear kernel (half-pixel centres, no
    antialiasing, core/kernels/image/resize_bilinear_op.cc) computes in fp32, and tf.cast to uint8 cuts off."""
    half = np.float32(0.5)

    def place(number: int, length: int) -> tuple[int, int, np.float32]:
        at = (np.float32(number) + half) * (np.float32(length) / np.float32(side)) - half
        return max(int(np.floor(at)), 0), min(int(np.ceil(at)), length - 1), at - np.floor(at)

    values: NDArray[Any] = pixels.astype(np.float32)
    found = np.empty((side, side, 3), np.uint8)
    columns = [place(column, pixels.shape[1]) for column in range(side)]
    left, right = (np.array([column[end] for column in columns], dtype=np.int64) for end in (0, 1))
    across: NDArray[Any] = np.array([[column[2]] for column in columns], dtype=np.float32)
    for row in range(side):
        above, below, down = place(row, pixels.shape[0])
        upper = values[above, left] + (values[above, right] - values[above, left]) * across
        lower = values[below, left] + (values[below, right] - values[below, left]) * across
        found[row] = (upper + (lower - upper) * down).astype(np.uint8)
    return found


def test_few_shot_images_are_big_visions(test_data: Path) -> None:
    """`resize(256)` and `central_crop(224)` of its configs/common_fewshot.py, equal on 50 photographs: bilinear without
    antialiasing to a square, and floats that are cut off. torch's fp32 depends on its threads, so that it may cut off
    another way where a value is nearly whole."""
    transform = EvaluationTransform(mode="fewshot")
    for path in sorted((test_data / "imagenet-sample").iterdir())[:50]:
        with Image.open(path) as image:
            pixels = np.asarray(image.convert("RGB"))
        planes = torch.from_numpy(pixels.copy()).permute(2, 0, 1)[None].double()
        resized = F.interpolate(planes, size=(256, 256), mode="bilinear", align_corners=False, antialias=False)
        exact = resized[0, :, 16:240, 16:240].permute(1, 2, 0).numpy()
        ours = np.empty((224, 224, 3), np.uint8)
        evaluation_view_of_pixels(pixels, transform, out=ours)
        np.testing.assert_array_equal(ours, cut_off(pixels, 256)[16:240, 16:240])
        is_whole = np.abs(exact - np.rint(exact)) < 1e-3
        np.testing.assert_array_equal(ours[~is_whole], exact[~is_whole].astype(np.uint8))


@settings(max_examples=40)
@given(height=st.integers(1, 90), width=st.integers(1, 90), size=st.integers(1, 30), seed=st.integers(0, 99))
def test_few_shot_images_are_cut_off_at_any_size(height: int, width: int, size: int, seed: int) -> None:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    ours, short = np.empty((size, size, 3), np.uint8), max(size, round(size * 256 / 224))
    evaluation_view_of_pixels(pixels, EvaluationTransform(mode="fewshot"), out=ours)
    first = (short - size) // 2
    expected = cut_off(pixels, short)[first : first + size, first : first + size]
    np.testing.assert_array_equal(ours, expected)


def test_other_evaluations_are_not_cut_off(test_data: Path) -> None:
    """vision_transformer resizes to floats; whole grey levels are the nearest ones."""
    with Image.open(sorted((test_data / "imagenet-sample").iterdir())[0]) as image:
        pixels = np.asarray(image.convert("RGB"))
    planes = torch.from_numpy(pixels.copy()).permute(2, 0, 1)[None].float()
    floats = F.interpolate(planes, size=(224, 224), mode="bilinear", align_corners=False)[0].permute(1, 2, 0).numpy()
    ours = np.empty((224, 224, 3), np.uint8)
    evaluation_view_of_pixels(pixels, EvaluationTransform(), out=ours)
    assert abs(float((ours - floats).mean())) < 0.2
    evaluation_view_of_pixels(pixels, EvaluationTransform(mode="fewshot", short_side=224), out=ours)
    assert float((ours - floats).mean()) < -0.4


@pytest.mark.parametrize("filter_name", ["bicubic", "bilinear"])
def test_pillows_filters_give_the_views_of_timm(test_data: Path, filter_name: str) -> None:
    """Its Resize and CenterCrop are torchvision's, which round an odd rest to another side than big_vision."""
    timms = imported("timm").data.create_transform(
        input_size=(3, 224, 224), interpolation=filter_name, crop_pct=0.892, mean=0.0, std=1.0
    )
    transform = EvaluationTransform(
        mode="central_crop",
        short_side=251,
        filter="bicubic" if filter_name == "bicubic" else "bilinear",
        antialias=filter_name == "bilinear",
    )
    sizes = [(334, 500), (500, 341), (236, 350), (375, 500), (300, 225), (249, 251)]
    for path, (height, width) in zip(sorted((test_data / "imagenet-sample").iterdir()), sizes, strict=False):
        with Image.open(path) as image:
            photograph = image.convert("RGB").resize((width, height))
        ours = np.empty((224, 224, 3), np.uint8)
        show(np.asarray(photograph), evaluation_viewport(height, width, transform, size=224), out=ours)
        expected = (timms(photograph).permute(1, 2, 0).numpy() * 255).round().astype(np.uint8)
        np.testing.assert_array_equal(ours, expected)
    square = replace(transform, mode="fewshot")
    assert evaluation_viewport(100, 50, square, size=224).top == 14  # of 13.5


LATE_CROPS = (AugmentConfig(crop="resize_crop"), AugmentConfig(crop="short_side_crop"))


@settings(max_examples=200)
@given(
    height=st.integers(1, 700),
    width=st.integers(1, 700),
    sample=st.integers(0, 2**40),
    size=st.sampled_from((1, 8, 48, 384)),
    resize_pixels=st.sampled_from((0, 7, 60, 448)),
    config=st.sampled_from(LATE_CROPS),
)
def test_a_crop_after_the_resize_is_a_square_inside_of_it(
    height: int, width: int, sample: int, size: int, resize_pixels: int, config: AugmentConfig
) -> None:
    config, draws = replace(config, resize_pixels=resize_pixels), one_draw(sample)
    crop = draw_crop(height, width, draws, config=config)
    assert (crop.top, crop.left, crop.height, crop.width) == (0, 0, height, width)
    viewport = training_viewport(crop, draws, config=config, size=size)
    least = max(size, resize_pixels or round(size * 448 / 384))
    assert min(viewport.height, viewport.width) == least
    assert 0 <= viewport.top <= viewport.height - size
    assert 0 <= viewport.left <= viewport.width - size
    assert viewport.is_mirrored == crop.flip
    if config.crop == "resize_crop":
        assert viewport.height == viewport.width
    elif height <= width:
        assert viewport.width == pytest.approx(width * least / height, abs=0.51)
    else:
        assert viewport.height == pytest.approx(height * least / width, abs=0.51)


@pytest.mark.parametrize("config", LATE_CROPS, ids=lambda config: config.crop)
def test_every_place_of_a_crop_after_the_resize_is_equally_likely(config: AugmentConfig) -> None:
    """40 x 60 pixels, of which 12 x 12 are cut out of 14 x 14 or 14 x 21: 3 x 3 or 3 x 10 places."""
    draws = draws_of(np.arange(9000), np.zeros(9000, dtype=np.int64), seed=8)
    crops = [draw_crop(40, 60, row, config=config) for row in draws]
    views = [training_viewport(crop, row, config=config, size=12) for crop, row in zip(crops, draws, strict=True)]
    across = 3 if config.crop == "resize_crop" else 10
    places = np.zeros((3, across, 2))
    for view in views:
        places[view.top, view.left, int(view.is_mirrored)] += 1
    expected = 9000 / places.size
    assert ((places - expected) ** 2 / expected).sum() < places.size + 5 * np.sqrt(2 * places.size), "chi squared"


@pytest.mark.parametrize(
    ("size", "short_side", "expected"),
    [
        pytest.param((375, 500), 448, (448, 597), id="597.33"),
        pytest.param((500, 375), 256, (341, 256), id="341.33"),
        pytest.param((384, 387), 448, (448, 451), id="451.5 is a little less in TensorFlow's fp32"),
        pytest.param((104, 143), 604, (604, 831), id="830.5 is a little more"),
        pytest.param((32, 32), 448, (448, 448), id="CIFAR"),
        pytest.param((1, 5000), 448, (448, 2_240_000), id="a line"),
        pytest.param((5000, 1), 48, (240_000, 48), id="a column"),
    ],
)
def test_the_short_side_is_exact_and_the_other_is_rounded_as_in_tensorflow(
    size: tuple[int, int], short_side: int, expected: tuple[int, int]
) -> None:
    assert short_side_resized(*size, short_side=short_side) == expected


def test_the_crops_before_a_resize_show_all_of_themselves() -> None:
    for config in (*CONFIGS, AugmentConfig(crop="none")):
        draws = one_draw(3)
        crop = draw_crop(90, 80, draws, config=config)
        shown_all = Viewport(height=24, width=24, is_mirrored=crop.flip)
        assert training_viewport(crop, draws, config=config, size=24) == shown_all
