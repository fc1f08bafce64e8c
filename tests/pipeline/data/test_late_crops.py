"""Views whose random square is cut after the resize, and images seen as they are stored, against other libraries."""

import io

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from numpy.typing import NDArray
from PIL import Image, ImageOps

from pipeline.data.augment import draw_crop, draws_of, training_viewport
from pipeline.data.config import AugmentConfig
from pipeline.data.transform import crop_decoder, evaluation_view, train_view
from pipeline.shared_settings import EvaluationTransform
from shards.orientation import TAG, TURNS
from tests.pipeline.data.test_transform import Sample, draws, evaluated, trained
from tests.rigs.images import image_bytes
from tests.rigs.jpegs import KINDS, jpeg_of

BIT, RESMALL = AugmentConfig(crop="resize_crop"), AugmentConfig(crop="short_side_crop")
AREA = AugmentConfig(crop="short_side_crop", filter="area")
SIMPLE = AugmentConfig(crop="simple_random", filter="bicubic")
SHAPES = [
    pytest.param(60, 84, id="a photograph"),
    pytest.param(84, 60, id="upright"),
    pytest.param(16, 16, id="enlarged"),
    pytest.param(3, 400, id="a strip"),
    pytest.param(400, 2, id="a tall strip"),
    pytest.param(1, 1, id="one pixel"),
]


def png_of(height: int, width: int) -> tuple[Sample, NDArray[np.uint8]]:
    pixels = np.random.default_rng(height).integers(0, 256, size=(height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return Sample(data=file.getvalue(), height=height, width=width), pixels


def place_of(seed: int, room: tuple[int, int]) -> tuple[int, int, bool]:
    """(top, left, whether mirrored) of a random crop, from the sample's third, fourth and last draw."""
    row = draws_of(np.array([seed]), np.array([0]), seed=1)[0]
    return int(row[2] * (room[0] + 1)), int(row[3] * (room[1] + 1)), bool(row[-1] < 0.5)


def cut(resized: NDArray[np.float64], seed: int, size: int) -> NDArray[np.float64]:
    top, left, is_mirrored = place_of(seed, (resized.shape[0] - size, resized.shape[1] - size))
    view = resized[top : top + size, left : left + size]
    return view[:, ::-1] if is_mirrored else view


@pytest.mark.parametrize(("height", "width"), SHAPES)
def test_resize_crop_is_torchs_resize_to_a_square_and_a_square_of_it(height: int, width: int) -> None:
    """48 px out of 56: 448/384 of the model's size."""
    sample, pixels = png_of(height, width)
    planes = torch.from_numpy(pixels).permute(2, 0, 1)[None].double()
    resized = F.interpolate(planes, size=(56, 56), mode="bilinear", align_corners=False)[0].permute(1, 2, 0).numpy()
    for seed in range(6):
        view = trained(sample, seed, BIT, size=48, use_library=True)
        assert np.abs(view - cut(resized, seed, 48)).max() <= 1


@pytest.mark.parametrize(("height", "width"), SHAPES)
def test_short_side_crop_is_pillows_resize_and_a_square_of_it(height: int, width: int) -> None:
    """Antialiased, as torchvision's Resize and RandomCrop would be."""
    config = AugmentConfig(crop="short_side_crop", antialias=True, resize_pixels=53)
    sample, pixels = png_of(height, width)
    short = min(height, width)
    size = round(width * 53 / short), round(height * 53 / short)
    resized = np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.BILINEAR)).astype(float)
    for seed in range(6):
        view = trained(sample, seed, config, size=48, use_library=True)
        assert np.abs(view - cut(resized, seed, 48)).max() <= 1


def bicubic(pixels: NDArray[np.uint8], *, height: int, width: int) -> NDArray[np.uint8]:
    """Pillow's, one direction at a time: Pillow 13 chooses which comes first."""
    broad = Image.fromarray(pixels).resize((width, pixels.shape[0]), Image.Resampling.BICUBIC)
    return np.asarray(broad.resize((width, height), Image.Resampling.BICUBIC))


@pytest.mark.parametrize(("height", "width"), SHAPES)
def test_simple_random_is_torchvisions_resize_and_padded_random_crop(height: int, width: int) -> None:
    """Resize(24, bicubic) rounds the long side down; RandomCrop(24, padding=4, padding_mode="reflect") uses np.pad."""
    sample, pixels = png_of(height, width)
    short = min(height, width)
    resized = bicubic(pixels, height=int(24 * height / short), width=int(24 * width / short))
    padded = np.pad(resized, ((4, 4), (4, 4), (0, 0)), mode="reflect")
    views = [trained(sample, seed, SIMPLE, size=24, use_library=True) for seed in range(6)]
    for seed, view in enumerate(views):
        np.testing.assert_array_equal(view, cut(padded.astype(float), seed, 24))
    assert len({view.tobytes() for view in views}) > 1 or height == width == 1


def test_a_bicubic_view_is_pillows_crop_and_resize() -> None:
    """As torchvision's RandomResizedCrop(interpolation=BICUBIC), and Resize and CenterCrop of an evaluation."""
    sample, pixels = png_of(60, 84)
    config = AugmentConfig(crop="random_resized", filter="bicubic", min_area=0.08)
    for seed in range(6):
        crop = draw_crop(60, 84, draws(seed), config=config)
        inner = pixels[crop.top : crop.top + crop.height, crop.left : crop.left + crop.width]
        expected = bicubic(inner, height=32, width=32)
        view = trained(sample, seed, config, size=32, use_library=True)
        np.testing.assert_array_equal(view, expected[:, ::-1] if crop.flip else expected)
    how = EvaluationTransform(mode="central_crop", short_side=40, filter="bicubic")
    expected = bicubic(pixels, height=40, width=56)[4:36, 12:44]
    np.testing.assert_array_equal(evaluated(sample, how, size=32, use_library=True), expected)


@pytest.mark.parametrize(("height", "width"), SHAPES)
def test_the_area_filter_averages_what_each_pixel_covers(height: int, width: int) -> None:
    """By repeating each pixel, then averaging in blocks: exact, however many it takes."""
    sample, pixels = png_of(height, width)
    short = min(height, width)
    rows, columns = round(height * 56 / short), round(width * 56 / short)

    def along(values: NDArray[np.float64], length: int) -> NDArray[np.float64]:
        repeated = np.repeat(values, length, axis=0)
        return np.asarray(repeated.reshape(length, values.shape[0], *values.shape[1:]).mean(axis=1))

    # One row of places at a time is enough: the view is 48 of up to 22,400 columns.
    wide = along(pixels.astype(float), rows).transpose(1, 0, 2)
    for seed in range(3):
        top, left, is_mirrored = place_of(seed, (rows - 48, columns - 48))
        scale = width / columns
        borders = np.arange(left, left + 49) * scale
        sums = np.concatenate([np.zeros((1, *wide.shape[1:])), wide.cumsum(axis=0)])
        whole = np.minimum(borders.astype(int), width - 1)
        integral = sums[whole] + wide[whole] * (borders - whole)[:, None, None]
        expected = (np.diff(integral, axis=0) / scale).transpose(1, 0, 2)[top : top + 48]
        view = trained(sample, seed, AREA, size=48, use_library=True)
        difference = (expected[:, ::-1] if is_mirrored else expected) - view
        assert difference.min() > -0.01
        assert difference.max() < 1.01


@pytest.mark.parametrize("mode", ["resize", "central_crop"])
def test_an_evaluation_with_the_area_filter_is_big_visions(mode: str) -> None:
    """resize_small(16) and central_crop(14): blocks of 3 x 3 pixels, averaged and cut to whole levels."""
    sample, pixels = png_of(48, 60)
    blocks = pixels.reshape(16, 3, 20, 3, 3).astype(float).mean(axis=(1, 3)).astype(np.uint8)
    expected = blocks[1:15, 3:17]
    how = EvaluationTransform(mode="central_crop", short_side=16, filter="area")
    if mode == "resize":
        sample, square = png_of(42, 28)
        expected = square.reshape(14, 3, 14, 2, 3).astype(float).mean(axis=(1, 3)).astype(np.uint8)
        how = EvaluationTransform(filter="area")
    np.testing.assert_array_equal(evaluated(sample, how, size=14, use_library=True), expected)


@pytest.mark.skipif(crop_decoder() is None, reason="the crop decoder was not built")
@pytest.mark.parametrize("config", [BIT, RESMALL, AREA, SIMPLE], ids=["BiT", "resmall", "area", "simple"])
@pytest.mark.parametrize("kind", KINDS)
def test_both_ways_to_a_view_give_the_same_pixels(kind: str, config: AugmentConfig) -> None:
    for seed, orientation in enumerate(TURNS):
        height, width = 40 + 50 * seed, 33 + 29 * seed
        data = jpeg_of(kind, height=height, width=width, seed=seed)
        sample = Sample(data=data, height=height, width=width, orientation=orientation)
        ours, theirs = (trained(sample, seed, config, size=24, use_library=use) for use in (True, False))
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("config", [BIT, AREA], ids=["BiT", "area"])
def test_a_scaled_decode_still_has_the_resized_images_size(config: AugmentConfig) -> None:
    """100 x 100 px at 1/2 would cover a view of 48 px, but not the 56 px that it is cut from."""
    sample = Sample(data=jpeg_of("420", height=100, width=100), height=100, width=100)
    exact = AugmentConfig(crop=config.crop, filter=config.filter, scaled_decode=False)
    for seed in range(4):
        scaled, whole = (trained(sample, seed, one, size=48, use_library=True) for one in (config, exact))
        np.testing.assert_array_equal(scaled, whole)
    large = Sample(data=jpeg_of("420", height=240, width=240), height=240, width=240)
    scaled, whole = (trained(large, 1, one, size=48, use_library=True) for one in (config, exact))
    assert not np.array_equal(scaled, whole)


@pytest.mark.parametrize("use_library", [True, False])
@pytest.mark.parametrize("orientation", TURNS)
def test_without_exif_an_image_is_seen_as_it_is_stored(orientation: int, use_library: bool) -> None:
    data = image_bytes(5, height=40, width=60, image_format="JPEG")
    turned = Sample(data=data, height=40, width=60, orientation=orientation)
    stored = Sample(data=data, height=40, width=60)
    for config in (AugmentConfig(), BIT, RESMALL):
        ignoring = AugmentConfig(crop=config.crop, exif=False)
        found = trained(turned, 2, ignoring, size=32, use_library=use_library)
        np.testing.assert_array_equal(found, trained(stored, 2, config, size=32, use_library=use_library))
    for mode in ("resize", "central_crop"):
        how, ignores = (EvaluationTransform(mode=mode, exif=exif) for exif in (True, False))
        found = evaluated(turned, ignores, size=32, use_library=use_library)
        np.testing.assert_array_equal(found, evaluated(stored, how, size=32, use_library=use_library))


@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_with_exif_an_image_is_seen_as_pillow_turns_it(orientation: int) -> None:
    exif = Image.Exif()
    exif[TAG] = orientation
    file = io.BytesIO()
    Image.open(io.BytesIO(image_bytes(6, height=48, width=64, image_format="PNG"))).save(file, "PNG", exif=exif)
    image = Image.open(io.BytesIO(file.getvalue()))
    sample = Sample(data=file.getvalue(), height=48, width=64, orientation=orientation)
    out = np.zeros((16, 16, 3), dtype=np.uint8)
    for how, seen in ((True, ImageOps.exif_transpose(image)), (False, image)):
        evaluation_view(sample, EvaluationTransform(antialias=True, exif=how), out=out)
        expected = np.asarray(seen.convert("RGB").resize((16, 16), Image.Resampling.BILINEAR)).astype(int)
        assert np.abs(out - expected).max() <= 1


def test_a_view_depends_on_its_own_draws_alone() -> None:
    """The same sample, seed and epoch give the same pixels, in any order; another epoch gives others."""
    sample, _ = png_of(60, 84)
    views: dict[int, NDArray[np.uint8]] = {}
    for epoch in (0, 1, 0):
        row = draws_of(np.array([7]), np.array([epoch]), seed=1)[0]
        out = np.zeros((48, 48, 3), dtype=np.uint8)
        train_view(sample, row, config=RESMALL, out=out)
        assert np.array_equal(views.setdefault(epoch, out), out)
    assert not np.array_equal(views[0], views[1])


def test_the_viewport_says_which_filter() -> None:
    crop = draw_crop(9, 9, draws(1), config=AREA)
    assert training_viewport(crop, draws(1), config=AREA, size=8).is_area
    assert not training_viewport(crop, draws(1), config=RESMALL, size=8).is_area
