"""Arms of benchmarks: ours compute what they should, and torchvision loads without its operators.

The peers' arms need an environment of their own (`make bench-env`). Their tests run with its Python, and are skipped in
any other.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simplejpeg
import torch

from benchmarks.kernels import attention, measured
from benchmarks.loader import absent
from benchmarks.loader_arms import ARMS, HOOK, PROCESSES, SAME_DECODER, WORKERS, one_epoch
from benchmarks.loader_prepare import BETON, ENERGON, NUM_TARS, PARQUET, PATCHLINE, SMALL_BLOCKS, WEBDATASET, prepare
from benchmarks.loader_settings import Settings
from benchmarks.loader_step import BusyStep
from benchmarks.order_arms import ARMS as ORDER_ARMS
from benchmarks.order_arms import BATCH as ORDER_BATCH
from benchmarks.order_arms import LARGE, OURS, ours
from benchmarks.s3_arms import epochs, position, start
from benchmarks.torchvision_operators import import_torchvision
from pipeline.data.config import DataConfig
from tests.rigs.images import image_bytes

IMAGES, BATCH, SIZE = 48, 8, 16


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    images = tmp_path_factory.mktemp("images")
    for number in range(20):
        (images / f"n{number % 3}_word{number}.JPEG").write_bytes(image_bytes(number, height=40, width=60))
    work = tmp_path_factory.mktemp("work")
    for _ in range(2):  # the second time there is nothing left to do
        prepare(images, work, IMAGES, peers=sys.executable, layouts=(PATCHLINE, SMALL_BLOCKS, WEBDATASET))
    return work


@pytest.mark.parametrize(
    "arm",
    [
        "patchline",
        "patchline, antialiased",
        "patchline, without the crop decoder",
        "patchline, libjpeg-turbo's Huffman decoder",
        "patchline, shuffles all",
        "bare full decode",
        "bare decode + crop + resize, 2 threads",
        "our view, from memory",
        HOOK,
        PROCESSES,
        pytest.param(f"{HOOK} on our crop", marks=pytest.mark.long),
        pytest.param(WORKERS, marks=pytest.mark.long),
        pytest.param(SAME_DECODER, marks=pytest.mark.long),
    ],
)
def test_an_arm_hands_over_one_epoch(arm: str, work: Path) -> None:
    settings = Settings(work=str(work), images=IMAGES, batch=BATCH, lanes=4, image_size=SIZE)
    found = one_epoch(ARMS[arm][0](settings), settings)
    assert found["label_counts"] == [21, 15, 12]  # the 20 images twice, and 8 more: the whole first class and one
    assert found["cpu_seconds_per_1000"] >= 0
    assert 0 < found["first_batch_seconds"] < found["epoch_wall_seconds"]


COLOURS = ((200, 40, 40), (40, 200, 40), (40, 40, 200))  # of the images of each class


@pytest.fixture(scope="module")
def coloured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    images = tmp_path_factory.mktemp("coloured")
    for number in range(12):
        pixels = np.empty((90, 120, 3), dtype=np.uint8)
        pixels[:] = COLOURS[number % 3]
        pixels[number::12] += 10  # every image has other lines, so faint that antialiasing barely changes the colour
        (images / f"n{number % 3}_word{number}.JPEG").write_bytes(simplejpeg.encode_jpeg(pixels, quality=95))
    return images


@pytest.mark.parametrize(
    ("arm", "module", "layouts"),
    [
        ("DALI", "nvidia.dali", ()),
        ("DALI, antialiased", "nvidia.dali", ()),
        pytest.param("FFCV", "ffcv", (BETON,), marks=pytest.mark.long),  # it compiles itself for half a minute
        ("SPDL", "spdl.io", ()),
        ("Energon", "megatron.energon", (ENERGON,)),
        pytest.param("HF datasets", "datasets", (PARQUET,), marks=pytest.mark.long),
        pytest.param("HF datasets, streaming", "datasets", (PARQUET,), marks=pytest.mark.long),
    ],
)
def test_a_peer_hands_over_crops_of_every_image_with_its_label(
    arm: str, module: str, layouts: tuple[str, ...], coloured: Path, tmp_path: Path
) -> None:
    pytest.importorskip(module, reason=f"{module} is only in the environment of make bench-env")
    num_images = 3 * BATCH * NUM_TARS  # whole batches for both workers, whose tars are half of all
    prepare(coloured, tmp_path, num_images, peers=sys.executable, layouts=layouts)
    settings = Settings(work=str(tmp_path), images=num_images, batch=BATCH, lanes=1, image_size=SIZE)
    counts = np.zeros(3, dtype=np.int64)
    for images, labels in ARMS[arm][0](settings)():
        views, classes = np.asarray(images), np.asarray(labels).reshape(-1)
        if views.shape[1] == 3:  # torchvision's layout
            views = np.moveaxis(views, 1, -1)
        assert views.shape == (BATCH, SIZE, SIZE, 3)
        assert views.dtype == np.uint8
        assert np.median(views, axis=(1, 2)) == pytest.approx(np.array(COLOURS)[classes], abs=4)
        assert len({view.tobytes() for view in views}) > 1
        counts += np.bincount(classes, minlength=3)
    assert counts.tolist() == [80, 80, 80]


def test_packages_that_a_python_lacks_are_named() -> None:
    assert absent(("numpy", "no-such-package"), python=sys.executable) == ["no-such-package"]


@pytest.mark.parametrize(
    ("lanes", "window_blocks", "images", "reach"),
    [(8, 1, 5120, 512), (8, 4, 5120, 2048), (64, 4, 5120, 5120)],
)
def test_the_reach_is_that_of_our_shuffle(lanes: int, window_blocks: int, images: int, reach: int) -> None:
    assert Settings(work="", images=images, lanes=lanes, window_blocks=window_blocks).reach == reach


def test_a_busy_step_counts_what_it_does_beside_the_loader(work: Path) -> None:
    settings = Settings(work=str(work), images=IMAGES, batch=BATCH, lanes=4, image_size=SIZE)
    with BusyStep(1) as step:
        found = one_epoch(ARMS["patchline"][0](settings), settings, step)
    assert found["step_alone_per_second"] > 0
    assert found["step_per_second"] >= 0
    assert step.count > found["step_alone_per_second"]  # it was alone for more than a second
    assert not step._thread.is_alive()


def test_images_are_taken_at_most_at_the_rate() -> None:
    def batches() -> Iterator[tuple[Any, Any]]:
        for _ in range(IMAGES // BATCH):
            yield np.zeros((BATCH, SIZE, SIZE, 3), dtype=np.uint8), np.zeros(BATCH, dtype=np.int64)

    settings = Settings(work="", images=IMAGES, batch=BATCH, image_size=SIZE)
    assert one_epoch(batches, settings, most_rate=10 * IMAGES)["epoch_wall_seconds"] >= 0.1


@pytest.mark.parametrize(
    ("shape", "dtype", "num_batches", "why"),
    [
        ((BATCH, SIZE, SIZE, 3), np.float32, 6, "not uint8"),
        ((BATCH, SIZE, SIZE + 1, 3), np.uint8, 6, "another size"),
        ((BATCH, SIZE, SIZE, 3), np.uint8, 5, "a batch is missing"),
        ((BATCH, SIZE, SIZE, 3), np.uint8, 7, "a batch too many"),
    ],
)
def test_anything_but_one_epoch_is_refused(shape: tuple[int, ...], dtype: Any, num_batches: int, why: str) -> None:
    def batches() -> Iterator[tuple[Any, Any]]:
        for _ in range(num_batches):
            yield np.zeros(shape, dtype=dtype), np.zeros(shape[0], dtype=np.int64)

    settings = Settings(work="", images=IMAGES, batch=BATCH, image_size=SIZE)
    with pytest.raises(RuntimeError, match="batch"):
        one_epoch(batches, settings)
    assert why


def test_images_are_whole_batches() -> None:
    with pytest.raises(ValueError, match="100"):
        Settings(work="", images=100)


def test_the_arms_of_s3_read_a_folder_too(work: Path) -> None:
    config = DataConfig(lanes=4, window_blocks=2, num_threads=2)
    given = argparse.Namespace(url=str(work / SMALL_BLOCKS), images=IMAGES, epochs=2, batch=BATCH, hash=True)
    first, again = epochs(given, config), epochs(given, config)
    assert first["pixels_sha256"] == again["pixels_sha256"]
    place = position(given, config)["position"]
    given.position = json.dumps(place | {"next_step": 5, "data_step": 5})
    assert start(given, config)["first_batch_seconds"] > 0


def test_our_order_gives_a_batch_of_different_samples() -> None:
    num_samples = 100_000
    ids = ours()(num_samples)
    assert ids.shape == (ORDER_BATCH,)
    assert np.unique(ids).size == ORDER_BATCH
    assert 0 <= ids.min() <= ids.max() < num_samples


def test_both_sizes_of_the_order_are_measured() -> None:
    assert f"{OURS}, {LARGE:,}" == "patchline, 303,000,000"
    assert "MosaicML, 10,000,000" in ORDER_ARMS


@pytest.mark.parametrize("shape", [(2, 3, 17, 8), (1, 2, 1025, 4)])
def test_both_kernels_of_a_pair_are_the_same_gradient(shape: tuple[int, int, int, int]) -> None:
    ours, theirs = (one() for one in attention(shape))
    assert isinstance(ours, tuple)
    assert isinstance(theirs, tuple)
    torch.testing.assert_close(ours[0], theirs[0], rtol=0.05, atol=0.02)  # both are rounded to bf16 several times


def test_a_pair_of_kernels_is_measured_round_by_round() -> None:
    row = measured((lambda: sum(range(400_000)), lambda: sum(range(100_000))), rounds=5)
    assert 2.0 < row["ratio"][1] < 8.0
    assert row["ours"][1] > row["pytorch"][1] > 0


def test_torchvision_imports_twice() -> None:
    module = import_torchvision()
    assert module is not None
    assert module.__name__ == "torchvision"
    assert import_torchvision() is module


def test_without_torchvision_nothing_is_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)  # as if it were not installed
    assert import_torchvision() is None
