"""One dataset or a mix; what fixes its batches; what reading ahead may hold."""

import json
import shutil
import unicodedata
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jobs.data.pack import PackJob, run
from pipeline.data.augment import AUGMENT_VERSION
from pipeline.data.config import AugmentConfig, DataConfig, MixupConfig, RandAugmentConfig
from pipeline.data.mixup import MIXUP_VERSION
from pipeline.data.position import position_from_json
from pipeline.data.training_data import TrainingData, check_memory, open_training_data, position_of
from shards.dataset import open_dataset
from shards.errors import InvalidDataError, UserError
from shards.manifest import LABELS_PATH, MANIFEST_PATH
from shards.sample_rows import BlockTable
from shards.sources.folders import FolderSource
from tests.rigs.datasets import packed_folders, packed_with_weights
from tests.rigs.images import image_bytes
from tests.rigs.tables import read_table

BATCH = 12


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packed_folders(tmp_path_factory.mktemp("data"), num_classes=3, images_a_class=8)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packed_folders(tmp_path_factory.mktemp("other"), num_classes=5, images_a_class=3)


def config_of(packed: Path) -> DataConfig:
    return DataConfig(url=str(packed), lanes=4, window_blocks=2, num_threads=2, augment=AugmentConfig(min_area=0.3))


def test_the_position_changes_with_what_changes_the_batches(packed: Path, other: Path) -> None:
    config = config_of(packed)

    def state(
        config: DataConfig, *, seed: int = 3, global_batch: int = BATCH, image_size: int = 16
    ) -> dict[str, object]:
        data = open_training_data(config)
        at = position_of(data, config, seed=seed, global_batch=global_batch, image_size=image_size)
        plain = at.to_json()
        assert position_from_json(json.loads(json.dumps(plain))) == at
        return plain

    own = state(config)
    parts = ((str(packed), 3), (str(other), 1))
    others = [
        state(config, seed=4),
        state(config, global_batch=24),
        state(config, image_size=32),
        state(replace(config, lanes=2)),
        state(replace(config, window_blocks=1)),
        state(replace(config, augment=AugmentConfig(min_area=0.4))),
        state(replace(config, augment=AugmentConfig(min_area=0.3, antialias=True))),
        state(replace(config, augment=AugmentConfig(min_area=0.3, filter="area"))),
        state(replace(config, augment=AugmentConfig(min_area=0.3, exif=False))),
        state(replace(config, augment=AugmentConfig(min_area=0.3, crop="resize_crop"))),
        state(replace(config, augment=AugmentConfig(min_area=0.3, crop="resize_crop", resize_pixels=20))),
        state(replace(config, augment=AugmentConfig(min_area=0.3, crop="short_side_crop"))),
        state(replace(config, augment=AugmentConfig(min_area=0.3, crop="simple_random"))),
        state(replace(config, augment=AugmentConfig(min_area=0.3, three_augment=True))),
        state(replace(config, augment=AugmentConfig(min_area=0.3, color_jitter=0.3))),
        state(replace(config, augment=AugmentConfig(min_area=0.3, repeats=3))),
        state(replace(config, randaugment=RandAugmentConfig(num_ops=2))),
        state(replace(config, mixup=MixupConfig(alpha=0.2))),
        state(replace(config, mixup=MixupConfig(alpha=0.2, cutmix_alpha=1.0))),
        state(replace(config, mixup=MixupConfig(cutmix_alpha=1.0))),
        state(replace(config, mixup=MixupConfig(cutmix_alpha=1.0, binary_targets=True))),
        state(replace(config, url=str(other))),
        state(replace(config, url="", mix=parts)),
        state(replace(config, url="", mix=parts[::-1])),
    ]
    assert all(other != own for other in others)
    assert len({json.dumps(other) for other in others}) == len(others)
    assert state(replace(config, num_threads=1, steps_ahead=1, memory_limit_bytes=10**9)) == own


def test_a_position_has_every_setting_that_determines_pixels(packed: Path) -> None:
    config = replace(config_of(packed), mixup=MixupConfig(alpha=0.2))
    found = position_of(open_training_data(config), config, seed=3, global_batch=BATCH, image_size=16)
    assert found.augment == asdict(config.augment) | {"version": AUGMENT_VERSION}
    assert found.mixup == asdict(config.mixup) | {"version": MIXUP_VERSION}
    assert (found.randaugment, found.mix, found.label_weights, found.skipped) == (None, None, False, ())


def test_a_mix_knows_every_class_once_by_its_name(packed: Path, other: Path) -> None:
    config = DataConfig(mix=((str(other), 0.25), (str(packed), 0.75)))
    data = open_training_data(config)
    assert data.quotas == (1, 3)
    assert data.label_names == ("c0", "c1", "c2", "c3", "c4")
    assert data.num_classes == 5
    assert [numbers.tolist() for numbers in data.label_maps] == [[0, 1, 2, 3, 4], [0, 1, 2]]


def test_a_mix_joins_names_that_differ_in_their_unicode_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packing writes one form; older datasets may have another."""
    urls = []
    for form in ("NFC", "NFD"):
        folder = tmp_path / form / "images" / unicodedata.normalize(form, "caf\u00e9")
        folder.mkdir(parents=True)
        for number in range(8):
            (folder / f"{number}.jpg").write_bytes(image_bytes(number))
        with monkeypatch.context() as patch:
            patch.setattr("shards.sources.names.class_name", str)
            patch.setattr("shards.packing.scan.class_name", str)
            job = PackJob(
                out=str(tmp_path / form / "packed"), source=FolderSource(root=str(tmp_path / form / "images"))
            )
            assert run(job) == 0
        urls.append(job.out)
    written = [read_table(Path(url, LABELS_PATH).read_bytes()).column("name")[0].as_py() for url in urls]
    assert written[0] != written[1]
    data = open_training_data(DataConfig(mix=((urls[0], 0.5), (urls[1], 0.5))))
    assert data.label_names == ("caf\u00e9",)
    assert [numbers.tolist() for numbers in data.label_maps] == [[0], [0]]


def test_weights_that_can_not_be_exact_are_refused(packed: Path, other: Path) -> None:
    parts = ((str(packed), 0.123456789), (str(other), 1))
    with pytest.raises(UserError, match=r"weights 0\.123456789, 1 repeat only after"):
        open_training_data(DataConfig(mix=parts))


def with_large_blocks(packed: Path) -> TrainingData:
    """A dataset as if it had 1,000 blocks of 16 MB."""
    dataset, numbers = open_dataset(str(packed)), np.arange(1000, dtype=np.int64)
    dataset.__dict__["blocks"] = BlockTable(
        shard=numbers.astype(np.int32),
        first_byte=numbers * 0,
        end_byte=numbers * 0 + 16_000_000,
        first_sample_id=numbers * 64,
        num_samples=numbers * 0 + 64,
    )
    return TrainingData(datasets=(dataset,), quotas=(1,))


@pytest.mark.parametrize(
    ("ranks", "local_ranks", "lanes", "batch", "at_least", "at_most"),
    [
        pytest.param(1, 1, 64, 64, 8.2, 10.4, id="2 x 4 blocks x 16 MB x 64 lanes, a cut block, single reads"),
        pytest.param(8, 8, 64, 64, 8.2, 10.4, id="all ranks on one host: the host is what counts"),
        pytest.param(8, 4, 64, 64, 4.1, 5.2, id="half of the ranks here"),
        pytest.param(8, 1, 64, 64, 1.0, 1.3, id="an eighth of the lanes here"),
        pytest.param(1, 1, 16, 16, 2.0, 2.6, id="fewer lanes"),
        pytest.param(1, 1, 16, 16 * 64, 2.0, 5.2, id="batches that take a quarter of a window each"),
    ],
)
def test_more_memory_than_allowed_is_refused_with_the_number(
    packed: Path, ranks: int, local_ranks: int, lanes: int, batch: int, at_least: float, at_most: float
) -> None:
    data = with_large_blocks(packed)
    config = DataConfig(lanes=lanes, window_blocks=4, memory_limit_bytes=100_000_000_000)
    orders = data.orders(config, seed=0)
    sizes: dict[str, Any] = {"global_batch": batch, "num_ranks": ranks, "num_local_ranks": local_ranks}
    bound = check_memory(data, config, orders, **sizes)
    assert at_least * 1e9 <= bound <= at_most * 1e9
    tight = replace(config, memory_limit_bytes=bound - 1)
    with pytest.raises(UserError, match=rf"may hold {bound / 1e9:.1f} GB .*--data\.memory-limit-bytes"):
        check_memory(data, tight, orders, **sizes)
    assert check_memory(data, replace(config, memory_limit_bytes=bound), orders, **sizes) == bound


def test_the_defaults_fit_vit_h14_at_a_batch_of_4096_on_one_host(packed: Path) -> None:
    """ImageNet-21k: 110 kB an image, blocks of 64, all 64 lanes read by the 8 ranks of one host."""
    data = with_large_blocks(packed)
    numbers = np.arange(221_875, dtype=np.int64)
    sizes = np.random.default_rng(0).normal(64 * 110_000, 64**0.5 * 90_000, numbers.size).astype(np.int64)
    data.datasets[0].__dict__["blocks"] = BlockTable(
        shard=numbers.astype(np.int32),
        first_byte=numbers * 0,
        end_byte=sizes,
        first_sample_id=numbers * 64,
        num_samples=numbers * 0 + 64,
    )
    config = DataConfig()
    orders = data.orders(config, seed=0)
    assert check_memory(data, config, orders, global_batch=4096, num_ranks=8, num_local_ranks=8) < 12e9


@pytest.mark.parametrize("num_classes", [2, 1 << 24])
def test_a_number_of_classes_that_contradicts_the_names_is_refused(
    packed: Path, other: Path, tmp_path: Path, num_classes: int
) -> None:
    """Before a model with as many outputs is made."""
    bad = shutil.copytree(packed, tmp_path / "bad")
    manifest = json.loads((bad / MANIFEST_PATH).read_text())
    (bad / MANIFEST_PATH).write_text(json.dumps(manifest | {"num_classes": num_classes}))
    for config in (config_of(bad), replace(config_of(bad), url="", mix=((str(other), 1), (str(bad), 1)))):
        with pytest.raises(InvalidDataError, match=rf"labels\.parquet .* it has 3 rows; allowed: {num_classes}"):
            _ = open_training_data(config).num_classes


def test_the_labels_of_an_image_are_counted_over_the_mix(packed: Path, tmp_path: Path) -> None:
    several = packed_with_weights(tmp_path, ["a|b,", "a,", "a|b|c,1|0.5|0.5", "c,"])
    assert open_training_data(DataConfig(url=str(several), lanes=1)).labels_per_image == pytest.approx(7 / 4)
    mix = DataConfig(mix=((str(packed), 3), (str(several), 1)), lanes=1)
    assert open_training_data(mix).labels_per_image == pytest.approx((3 * 1 + 7 / 4) / 4)
