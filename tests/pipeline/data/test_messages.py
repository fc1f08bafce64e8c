"""What loading and its settings say when they refuse, each message once."""

import struct
from ctypes import util
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pipeline.data.config import AugmentConfig, DataConfig, MixupConfig, RandAugmentConfig
from pipeline.data.crop_decoder import CropDecoder
from pipeline.data.mixup import draw_mix, mix_weights
from pipeline.data.position import StepRange, position_from_json, refuse_disorder
from pipeline.data.quarantine import Quarantine
from pipeline.data.window_resize import cover_resize
from pipeline.shared_settings import EvaluationTransform
from tests.pipeline.data.test_mixup import CUTMIX, SIZE, places
from tests.pipeline.data.test_position import HERE, ranges
from tests.pipeline.data.test_quarantine import sample
from tests.pipeline.data.test_transform import PLAIN, Sample, trained
from tests.rigs.images import image_bytes
from tests.rigs.jpegs import jpeg_of
from tests.rigs.messages import Row, row, table


def crop_bounds(_: Path, areas: tuple[float, float], ratios: tuple[float, float]) -> None:
    AugmentConfig(min_area=areas[0], max_area=areas[1], min_ratio=ratios[0], max_ratio=ratios[1])


def data_config(_: Path, change: dict[str, Any]) -> None:
    replace(DataConfig(url="a"), **change)


def augment_config(_: Path, change: dict[str, Any]) -> None:
    AugmentConfig(**change)


def area_filter_with_antialiasing(_: Path) -> None:
    EvaluationTransform(mode="central_crop", filter="area", antialias=True)


def another_library(_: Path) -> None:
    name = util.find_library("m")
    if name is None:
        pytest.skip("the system's mathematics library is not found by name")
    CropDecoder(Path(name))


def mixed_places(_: Path, positions: NDArray[np.int64]) -> None:
    mix_weights(0, positions, seed=0, alpha=0.5)


def position(_: Path, change: dict[str, Any]) -> None:
    position_from_json(HERE.to_json() | change)


def overlapping_ranges(_: Path) -> None:
    refuse_disorder(ranges((2, 4), (4, 9)))
    refuse_disorder(ranges((2, 4), (3, 9)))


def step_range(_: Path, first: int, end: int) -> None:
    StepRange(first=first, end=end)


def quarantined(folder: Path, num_read: int, max_share: float, allowed: int) -> None:
    path = folder / "quarantine.jsonl"
    quarantine = Quarantine(path, max_share=max_share)
    quarantine.count(num_read)
    for i in range(allowed):
        quarantine.replace(sample(i), url="data", substitute=0, is_first=True)
    quarantine.replace(sample(allowed), url="data", substitute=0, is_first=True)


def randaugment_of(_: Path, num_ops: int, magnitude: int) -> None:
    RandAugmentConfig(num_ops=num_ops, magnitude=magnitude)


def color_jitter(_: Path, value: float) -> None:
    AugmentConfig(color_jitter=value)


def decoded_as_another_size(_: Path, use_library: bool, image_format: str) -> None:
    sample = Sample(data=image_bytes(1, image_format=image_format), height=25, width=32)
    trained(sample, 1, PLAIN, size=16, use_library=use_library)


def image_bomb(_: Path, use_library: bool) -> None:
    data = bytearray(jpeg_of("420", height=16, width=16))
    place = data.index(b"\xff\xc0") + 5
    data[place : place + 4] = struct.pack(">HH", 15_000, 15_000)
    trained(Sample(data=bytes(data), height=15_000, width=15_000), 1, PLAIN, size=16, use_library=use_library)


def unknown_orientation(_: Path) -> None:
    trained(Sample(data=image_bytes(1), height=24, width=32, orientation=9), 1, PLAIN, size=16, use_library=True)


def very_tall_image(_: Path) -> None:
    line = np.zeros((9_000_000, 1, 3), dtype=np.uint8)
    cover_resize(line, (16, 16), rows=slice(0, 16), columns=slice(0, 16))


@table(
    # augment
    row("no area at all", crop_bounds, (0.0, 1.0), (0.75, 1.33)).says(
        "data.augment.min_area is 0.0; allowed: above 0 to 1"
    ),
    row("areas crossed", crop_bounds, (0.5, 0.4), (0.75, 1.33)).says(
        "data.augment.min_area is 0.5, more than data.augment.max_area, 0.4; lower the first or raise the second"
    ),
    row("more than the image", crop_bounds, (0.5, 1.1), (0.75, 1.33)).says(
        "data.augment.max_area is 1.1; allowed: above 0 to 1"
    ),
    row("no width at all", crop_bounds, (0.5, 1.0), (0.0, 1.33)).says(
        "data.augment.min_ratio is 0.0; allowed: above 0"
    ),
    row("ratios crossed", crop_bounds, (0.5, 1.0), (1.4, 1.33)).says(
        "data.augment.min_ratio is 1.4, more than data.augment.max_ratio, 1.33; lower the first or raise the second"
    ),
    # config
    row("data: lanes: 0", data_config, {"lanes": 0}).says("data.lanes is 0; allowed: 1 or more"),
    row("data: window_blocks: 0", data_config, {"window_blocks": 0}).says(
        "data.window_blocks is 0; allowed: 1 or more"
    ),
    row("data: steps_ahead: 0", data_config, {"steps_ahead": 0}).says("data.steps_ahead is 0; allowed: 1 or more"),
    row("data: num_threads: -1", data_config, {"num_threads": -1}).says(
        "data.num_threads is -1; allowed: 0 (the rank's share of the cores) or more"
    ),
    row("data: max_quarantined: 1.5", data_config, {"max_quarantined": 1.5}).says(
        "data.max_quarantined is 1.5; allowed: 0 to 1"
    ),
    row("data: mix: ((b, 1.0), (c, 0.0))", data_config, {"mix": (("b", 1.0), ("c", 0.0))}).says(
        "data.mix.1.1 is 0.0; allowed: above 0"
    ),
    row("data: mix: ((b,),)", data_config, {"mix": (("b",),)}).says("data.mix.0 has 1 entries; allowed: 2"),
    row("data: mix: [(b, 1.0)]", data_config, {"mix": [("b", 1.0)]}).says("data.mix is [('b', 1.0)]; allowed: a tuple"),
    row("data: mix: ((b, 1.0),)", data_config, {"mix": (("b", 1.0),)}).says(
        "the data is url a and a mix of 1; give one of the two"
    ),
    row("augmentation: resize_pixels: -1", augment_config, {"resize_pixels": -1}).says(
        "data.augment.resize_pixels is -1; allowed: 0 (448/384 of the model's size) or more"
    ),
    row("augmentation: filter: box", augment_config, {"filter": "box"}).says(
        "data.augment.filter is 'box'; allowed: bilinear, area, bicubic"
    ),
    row(
        "augmentation: filter: area, antialias: True",
        augment_config,
        {"filter": "area", "antialias": True},
    ).says(
        "data.augment.antialias is on with data.augment.filter area, which averages by itself; switch "
        "data.augment.antialias off, or set data.augment.filter to bilinear"
    ),
    row(
        "augmentation: filter: bicubic, antialias: True",
        augment_config,
        {"filter": "bicubic", "antialias": True},
    ).says(
        "data.augment.antialias is on with data.augment.filter bicubic, which averages by itself; switch "
        "data.augment.antialias off, or set data.augment.filter to bilinear"
    ),
    row("a negative short side", lambda _: EvaluationTransform(mode="central_crop", short_side=-5)).says(
        "transform.short_side is -5; allowed: 0 (256/224 of the model's size) or more"
    ),
    row("antialiasing of the area filter", area_filter_with_antialiasing).says(
        "transform.antialias is on with transform.filter area, which averages by itself; switch "
        "transform.antialias off, or set transform.filter to bilinear"
    ),
    # crop_decoder
    row("another library", another_library).says(
        "ValueError: libm.so.6 is another library or an old one: /lib/x86_64-linux-gnu/libm.so.6: undefined "
        "symbol: crop_decoder_sources"
    ),
    # mixup
    row("half a pair at the end", mixed_places, places(0, 3)).says(
        "ValueError: positions [0 1 2] are not whole pairs (2k, 2k + 1)"
    ),
    row("half a pair at either end", mixed_places, places(1, 5)).says(
        "ValueError: positions [1 2 3 4] are not whole pairs (2k, 2k + 1)"
    ),
    row("no neighbours", mixed_places, np.array([0, 2])).says(
        "ValueError: positions [0 2] are not whole pairs (2k, 2k + 1)"
    ),
    row("the wrong way round", mixed_places, np.array([1, 0])).says(
        "ValueError: positions [1 0] are not whole pairs (2k, 2k + 1)"
    ),
    row("a split pair", lambda _: draw_mix(0, places(1, 3), seed=0, config=CUTMIX, image_size=SIZE)).says(
        "ValueError: positions [1 2] are not whole pairs (2k, 2k + 1)"
    ),
    row("binary targets without mixing", lambda _: MixupConfig(binary_targets=True)).says(
        "data.mixup.binary_targets is on without mixup, whose targets it changes; give --data.mixup.alpha or "
        "--data.mixup.cutmix-alpha, or --data.mixup.no-binary-targets"
    ),
    # position
    row("a text for a number", position, {"seed": "0"}).says("ValueError: seed: Input should be a valid integer"),
    row("a truth value for a number", position, {"seed": True}).says(
        "ValueError: seed: Input should be a valid integer"
    ),
    row("a float for a whole number", position, {"lanes": 8.0}).says(
        "ValueError: lanes: Input should be a valid integer"
    ),
    row("before the beginning", position, {"next_step": -1}).says(
        "ValueError: next_step: Input should be greater than or equal to 0"
    ),
    row("a setting of no value", position, {"augment": {"crop": None}}).says(
        "ValueError: augment.crop.bool: Input should be a valid boolean"
    ),
    row("a fingerprint that is a number", position, {"dataset": ["ab", 3]}).says(
        "ValueError: dataset.str: Input should be a valid string"
    ),
    row("a field of another version", position, {"later": 1}).says("ValueError: later: Unexpected keyword argument"),
    row("a data step that does not follow", position, {"data_step": 4}).says(
        "ValueError: : Value error, data_step is 4; allowed: 5, as follows from what was skipped"
    ),
    row("skipped twice", position, {"skipped": [{"first": 1, "end": 4}, {"first": 3, "end": 5}]}).says(
        "ValueError: : Value error, skipped data steps from 3 on follow those to 3"
    ),
    row("what JSON cannot hold", position, {"mixup": {1}}).says(
        "ValueError: Object of type set is not JSON serializable"
    ),
    row("ranges that overlap", overlapping_ranges).says("ValueError: skipped data steps from 3 on follow those to 3"),
    row("an empty range: 3 3", step_range, 3, 3).says(
        "ValueError: skipped data steps 3 to 2; allowed: one or more, from 0 on"
    ),
    row("an empty range: 4 2", step_range, 4, 2).says(
        "ValueError: skipped data steps 4 to 1; allowed: one or more, from 0 on"
    ),
    row("an empty range: -1 2", step_range, -1, 2).says(
        "ValueError: skipped data steps -1 to 1; allowed: one or more, from 0 on"
    ),
    # quarantine
    row("ten are always allowed: a short run has too few to speak of shares", quarantined, 100, 0.001, 10).says(
        "WillNotSucceedError: 11 of 100 samples could not be used, more than the allowed 0.10%, the last of them "
        "sample 10 (c0/10.jpg) of data: crc; they are listed in DIR/quarantine.jsonl; mend or repack the dataset, "
        "or allow more by --data.max-quarantined (in Python, DataConfig(max_quarantined=...))"
    ),
    row("0.1 % of 20,000", quarantined, 20_000, 0.001, 20).says(
        "WillNotSucceedError: 21 of 20000 samples could not be used, more than the allowed 0.10%, the last of "
        "them sample 20 (c0/20.jpg) of data: crc; they are listed in DIR/quarantine.jsonl; mend or repack the "
        "dataset, or allow more by --data.max-quarantined (in Python, DataConfig(max_quarantined=...))"
    ),
    row("no share", quarantined, 20_000, 0.0, 10).says(
        "WillNotSucceedError: 11 of 20000 samples could not be used, more than the allowed 0.00%, the last of "
        "them sample 10 (c0/10.jpg) of data: crc; they are listed in DIR/quarantine.jsonl; mend or repack the "
        "dataset, or allow more by --data.max-quarantined (in Python, DataConfig(max_quarantined=...))"
    ),
    # randaugment
    row("RandAugment: -1 10", randaugment_of, -1, 10).says("data.randaugment.num_ops is -1; allowed: 0 (off) or more"),
    row("RandAugment: 2 -1", randaugment_of, 2, -1).says("data.randaugment.magnitude is -1; allowed: 0 to 20"),
    row("RandAugment: 2 21", randaugment_of, 2, 21).says("data.randaugment.magnitude is 21; allowed: 0 to 20"),
    # three_augment
    *(
        row(f"colour jitter, {value}", color_jitter, value).says(
            "data.augment.color_jitter is ….1; allowed: 0 (off) to 1"
        )
        for value in (-0.1, 1.1)
    ),
    # transform
    *(
        row(
            f"another size than the index's, {use_library}, {image_format}",
            decoded_as_another_size,
            use_library,
            image_format,
        ).says("DecodeError: the image has 24 x 32 pixels (height x width), the index says 25 x 32")
        for use_library in (True, False)
        for image_format in ("JPEG", "PNG")
    ),
    *(
        row(
            f"a bomb, {use_library}",
            image_bomb,
            use_library,
        ).says("DecodeError: 15000 x 15000 pixels are above 178956970")
        for use_library in (True, False)
    ),
    row("an orientation that is none", unknown_orientation).says("DecodeError: orientation 9; allowed: 1 to 8"),
    # window_resize
    row("more rows than can be resized", very_tall_image).says(
        "DecodeError: 9000000 rows are too many to be resized to 16 columns one by one"
    ),
)
def test_messages(refusal: Row, tmp_path: Path) -> None:
    refusal.check(tmp_path)
