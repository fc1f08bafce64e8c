"""Made datasets of VTAB-1k's 19 tasks, in the form that TensorFlow Datasets (TFDS) gives the real ones.

The features with their types, the sizes and formats of the images, and the files of class names are those of the
builders in github.com/tensorflow/datasets. Which examples a part takes, and the class of each case, are worked out by
hand from github.com/google-research/task_adaptation, `task_adaptation/data/*.py`. A split has one record for each of a
few cases, repeated, and is only as large as the parts need. Records that no part takes have no label.
"""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.rigs.prepared import Value, example, write_prepared

Features = Mapping[str, Sequence[Value]]
Cases = Sequence[tuple[Features, int]]
Part = Sequence[tuple[str, int, int]]
BLOCK = 4  # pixels


@dataclass(frozen=True, kw_only=True)
class Picture:
    """The size and format of a dataset's images. `mode` is Pillow's."""

    height: int
    width: int
    image_format: str = "JPEG"
    mode: str = "RGB"

    @property
    def num_pixels(self) -> int:
        return self.height * self.width


@dataclass(frozen=True, kw_only=True)
class Made:
    """A dataset to make, and what a task takes of it.

    `beside`: the features that the task does not use. `id_feature`: the feature with the name in the original dataset;
    empty if this version has none. `class_names`: for each feature, the names that TFDS writes to FEATURE.labels.txt.
    `published`: the real dataset's splits, with their numbers of examples. `ranges`: the examples of these that
    train800, val200 and test take.
    """

    dataset: str
    version: str
    picture: Picture
    counts: Mapping[str, int]
    parts: Mapping[str, Part]
    published: Mapping[str, int]
    ranges: Mapping[str, tuple[str, int, int]]
    cases: Cases
    beside: Features = field(default_factory=dict)
    id_feature: str = "file_name"
    original_name: str = "image_{:05d}.jpg"
    class_names: Mapping[str, Sequence[str]] = field(default_factory=dict)


def image(picture: Picture, case: int, *, binary: bool = False) -> bytes:
    """An image of one grey level or, if it is binary, a rectangle of whole blocks: different for every case."""
    shape = (picture.height, picture.width)
    pixels = np.full(shape, 10 + 25 * case, np.uint8)
    if binary:  # pixels of 0 and 1
        pixels = np.zeros(shape, np.uint8)
        top, left = 2 * BLOCK + 7 * BLOCK * (case // 4), 3 * BLOCK * (case % 4 + 1)
        pixels[top : top + 5 * BLOCK, left : left + 2 * BLOCK] = 1
    file = io.BytesIO()
    options: dict[str, Any] = {"quality": 72} if picture.image_format == "JPEG" else {}
    Image.fromarray(pixels).convert(picture.mode).save(file, picture.image_format, **options)
    return file.getvalue()


def clevr(*depths: float) -> Features:
    """A scene of objects at these depths."""
    num = len(depths)
    return {
        "objects/color": [3] * num,
        "objects/material": [1] * num,
        "objects/shape": [2] * num,
        "objects/size": [1] * num,
        "objects/rotation": [269.5] * num,
        "objects/3d_coords": [-1.5, 2.25, 0.35] * num,
        "objects/pixel_coords": [coordinate for depth in depths for coordinate in (240.0, 160.0, depth)],
    }


def kitti(*objects: tuple[int, float]) -> Features:
    """A street with objects: their types, and their depths in metres."""
    num = len(objects)
    return {
        "objects/type": [kind for kind, _ in objects],
        "objects/truncated": [0.5] * num,
        "objects/occluded": [2] * num,
        "objects/alpha": [-1.5] * num,
        "objects/bbox": [0.25, 0.5, 0.75, 0.625] * num,
        "objects/dimensions": [1.5, 1.625, 3.75] * num,
        "objects/location": [coordinate for _, depth in objects for coordinate in (-1.0, 2.0, depth)],
        "objects/rotation_y": [1.5] * num,
    }


def labels(feature: str, *classes: tuple[int, int]) -> Cases:
    """Cases of a feature whose value decides the class."""
    return [({feature: [value]}, found) for value, found in classes]


def names(count: int, *first: str) -> tuple[str, ...]:
    """As many class names as the dataset has: some real ones, and made ones in their form."""
    return (*first, *(f"{first[-1]} {number}" for number in range(count - len(first))))


def parts_of(train: tuple[str, int], validation: tuple[str, int], test: tuple[str, int, int]) -> dict[str, Part]:
    """The parts of a made dataset. Of the first two splits, where the 800 and the 200 examples begin."""
    (split, first), (other, begin) = train, validation
    return {"train": [(split, first, first + 800), (other, begin, begin + 200)], "test": [test]}


def ranges_of(validation: tuple[str, int], test: tuple[str, int, int]) -> dict[str, tuple[str, int, int]]:
    """The parts of a real dataset."""
    split, begin = validation
    return {"train800": ("train", 0, 800), "val200": (split, begin, begin + 200), "test": test}


OWN = {"train": 803, "validation": 204, "test": 9}  # splits of TFDS's own
OWN_PARTS = parts_of(("train", 0), ("validation", 0), ("test", 0, 9))
# 90 % of 2,010 are 1,809.
OF_90 = parts_of(("train", 0), ("train", 1809), ("test", 0, 9))
# 60 % of 1,401 are 840 and 20 % are 280, both rounded down.
SIXTY_TWENTY = parts_of(("train", 0), ("train", 840), ("train", 1120, 1401))
# 80 % of 1,003 are 802 and 10 % are 100.
DSPRITES = parts_of(("train", 0), ("train", 802), ("train", 902, 1003))
# Half of 405 is 202.5, which Python and TFDS round to 202.
SMALLNORB = parts_of(("train", 0), ("test", 0), ("test", 202, 405))

CLEVR: dict[str, Any] = {
    "dataset": "clevr",
    "picture": Picture(height=320, width=480, image_format="PNG", mode="RGBA"),  # opaque
    "counts": {"train": 2010, "validation": 9, "test": 5},
    "parts": parts_of(("train", 0), ("train", 1809), ("validation", 0, 9)),
    "published": {"train": 70_000, "validation": 15_000, "test": 15_000},
    "ranges": ranges_of(("train", 63_000), ("validation", 0, 15_000)),
    "original_name": "CLEVR_train_{:06d}.png",
    "class_names": {
        "objects-color": ("gray", "blue", "brown", "yellow", "red", "green", "purple", "cyan"),
        "objects-material": ("rubber", "metal"),
        "objects-shape": ("cube", "sphere", "cylinder"),
        "objects-size": ("small", "large"),
    },
}
DSPRITE: dict[str, Any] = {
    "dataset": "dsprites",
    "version": "2.0.0",
    "picture": Picture(height=64, width=64, image_format="PNG", mode="L"),
    "counts": {"train": 1003},
    "parts": DSPRITES,
    "published": {"train": 737_280},
    "ranges": ranges_of(("train", 589_824), ("train", 663_552, 737_280)),
    "beside": {
        "label_shape": [2],
        "label_scale": [5],
        "label_orientation": [39],
        "label_x_position": [31],
        "label_y_position": [30],
        "value_shape": [3.0],
        "value_scale": [1.0],
        "value_orientation": [6.25],
        "value_x_position": [1.0],
        "value_y_position": [0.96875],
    },
    "id_feature": "",
}
NORB: dict[str, Any] = {
    "dataset": "smallnorb",
    "version": "2.0.0",
    "picture": Picture(height=96, width=96, image_format="PNG", mode="L"),
    "counts": {"train": 803, "test": 405},
    "parts": SMALLNORB,
    "published": {"train": 24_300, "test": 24_300},
    "ranges": ranges_of(("test", 0), ("test", 12_150, 24_300)),
    "beside": {
        "image2": [image(Picture(height=96, width=96, image_format="PNG", mode="L"), 9)],
        "label_category": [4],
        "instance": [9],
        "label_elevation": [7],
        "label_azimuth": [16],
        "label_lighting": [5],
    },
    "id_feature": "",
    "class_names": {"label_category": ("four-legged animals", "human figures", "airplanes", "trucks", "cars")},
}
EUROSAT_NAMES = (
    *("AnnualCrop", "Forest", "HerbaceousVegetation", "Highway", "Industrial"),
    *("Pasture", "PermanentCrop", "Residential", "River", "SeaLake"),
)
MADE = {
    "caltech101": Made(
        dataset="caltech101",
        version="3.0.2",
        picture=Picture(height=200, width=300),
        counts={"train": 2010, "test": 9},
        parts=OF_90,
        published={"train": 3060, "test": 6084},
        ranges=ranges_of(("train", 2754), ("test", 0, 6084)),
        cases=labels("label", (0, 0), (101, 101)),
        id_feature="image/file_name",
        class_names={"label": names(102, "accordion", "airplanes", "background_google")},
    ),
    "cifar100": Made(
        dataset="cifar100",
        version="3.0.2",
        picture=Picture(height=32, width=32, image_format="PNG"),
        counts={"train": 2010, "test": 9},
        parts=OF_90,
        published={"train": 50_000, "test": 10_000},
        ranges=ranges_of(("train", 45_000), ("test", 0, 10_000)),
        cases=[({"label": [99], "coarse_label": [3]}, 99), ({"label": [7], "coarse_label": [1]}, 7)],
        id_feature="id",
        original_name="train_{:05d}",
        class_names={
            "label": names(100, "apple", "aquarium_fish"),
            "coarse_label": names(20, "aquatic_mammals"),
        },
    ),
    "dtd": Made(
        dataset="dtd",
        version="3.0.1",
        picture=Picture(height=300, width=400),
        counts=OWN,
        parts=OWN_PARTS,
        published={"train": 1880, "test": 1880, "validation": 1880},
        ranges=ranges_of(("validation", 0), ("test", 0, 1880)),
        cases=labels("label", (46, 46), (0, 0)),
        original_name="banded/banded_{:04d}.jpg",
        class_names={"label": names(47, "banded", "blotchy")},
    ),
    "flowers102": Made(
        dataset="oxford_flowers102",
        version="2.1.1",
        picture=Picture(height=500, width=591),
        counts=OWN,
        parts=OWN_PARTS,
        published={"train": 1020, "test": 6149, "validation": 1020},
        ranges=ranges_of(("validation", 0), ("test", 0, 6149)),
        cases=labels("label", (0, 0), (1, 1), (101, 101)),
        class_names={"label": names(102, "pink primrose", "colt's foot", "pink-yellow dahlia?")},
    ),
    "pets": Made(
        dataset="oxford_iiit_pet",
        version="4.0.0",
        picture=Picture(height=375, width=500),
        counts={"train": 1001, "test": 9},
        # 80 % of 1,001 are 800.
        parts=parts_of(("train", 0), ("train", 800), ("test", 0, 9)),
        published={"train": 3680, "test": 3669},
        ranges=ranges_of(("train", 2944), ("test", 0, 3669)),
        cases=[({"label": [36], "species": [1]}, 36), ({"label": [2], "species": [0]}, 2)],
        beside={
            "segmentation_mask": [image(Picture(height=375, width=500, image_format="PNG", mode="L"), 0)],
            "head_bbox": [0.25, 0.5, 0.375, 0.75],
        },
        original_name="Abyssinian_{}.jpg",
        class_names={"label": names(37, "Abyssinian", "american_bulldog"), "species": ("Cat", "Dog")},
    ),
    "sun397": Made(
        dataset="sun397/tfds",
        version="4.0.0",
        picture=Picture(height=300, width=400),
        counts=OWN,
        parts=OWN_PARTS,
        published={"train": 76_128, "test": 21_750, "validation": 10_875},
        ranges=ranges_of(("validation", 0), ("test", 0, 21_750)),
        cases=labels("label", (396, 396), (3, 3)),
        original_name="/a/abbey/sun_{:016d}.jpg",
        class_names={"label": names(397, "/a/abbey", "/a/airplane_cabin", "/a/apartment_building/outdoor")},
    ),
    "svhn": Made(
        dataset="svhn_cropped",
        version="3.1.0",
        picture=Picture(height=32, width=32, image_format="PNG"),
        counts={"train": 2010, "test": 9, "extra": 4},
        parts=OF_90,
        published={"train": 73_257, "test": 26_032, "extra": 531_131},
        ranges=ranges_of(("train", 65_931), ("test", 0, 26_032)),
        cases=labels("label", (9, 9), (0, 0)),
        id_feature="id",
        original_name="train_{:06d}",
    ),
    "patch_camelyon": Made(
        dataset="patch_camelyon",
        version="2.0.0",
        picture=Picture(height=96, width=96, image_format="PNG"),
        counts=OWN,
        parts=OWN_PARTS,
        published={"train": 262_144, "test": 32_768, "validation": 32_768},
        ranges=ranges_of(("validation", 0), ("test", 0, 32_768)),
        cases=labels("label", (0, 0), (1, 1)),
        id_feature="id",
        original_name="train_{}",
    ),
    "eurosat": Made(
        dataset="eurosat/rgb",
        version="2.0.0",
        picture=Picture(height=64, width=64),
        counts={"train": 1401},
        parts=SIXTY_TWENTY,
        published={"train": 27_000},
        ranges=ranges_of(("train", 16_200), ("train", 21_600, 27_000)),
        cases=labels("label", (0, 0), (1, 1), (9, 9)),
        id_feature="filename",
        original_name="Forest_{}.jpg",
        class_names={"label": EUROSAT_NAMES},
    ),
    "resisc45": Made(
        dataset="resisc45",
        version="3.0.0",
        picture=Picture(height=256, width=256),
        counts={"train": 1401},
        parts=SIXTY_TWENTY,
        published={"train": 31_500},
        ranges=ranges_of(("train", 18_900), ("train", 25_200, 31_500)),
        cases=labels("label", (0, 0), (1, 1), (44, 44)),
        id_feature="filename",
        original_name="airplane_{:03d}.jpg",
        class_names={"label": names(45, "airplane", "airport", "baseball_diamond")},
    ),
    "retinopathy": Made(
        dataset="diabetic_retinopathy_detection/btgraham-300",
        version="3.0.0",
        picture=Picture(height=540, width=540),
        counts={"sample": 10, **OWN},
        parts=OWN_PARTS,
        published={"sample": 10, "train": 35_126, "validation": 10_906, "test": 42_670},
        ranges=ranges_of(("validation", 0), ("test", 0, 42_670)),
        cases=labels("label", (0, 0), (1, 1), (4, 4)),
        id_feature="name",
        original_name="{}_left",
    ),
    "clevr_count": Made(
        **CLEVR,
        version="3.1.0",
        cases=[(clevr(9.0, 9.0, 9.0), 0), (clevr(*[9.0] * 7), 4), (clevr(*[9.0] * 10), 7)],
        beside={
            "question_answer/question": [b"Are there any cubes?", b"How many cyan things are there?"],
            "question_answer/answer": [b"no", b"2"],
        },
    ),
    "clevr_distance": Made(
        **CLEVR,
        version="3.0.0",
        cases=[
            *((clevr(11.0, 7.9, 9.9), 0), (clevr(8.0, 9.0), 0), (clevr(8.25), 1), (clevr(9.0, 8.75, 12.0), 2)),
            *((clevr(9.5), 3), (clevr(9.75, 10.5), 4), (clevr(10.5), 5), (clevr(10.0, 30.0), 4)),
        ],
    ),
    "dmlab": Made(
        dataset="dmlab",
        version="2.0.1",
        picture=Picture(height=360, width=480),
        counts=OWN,
        parts=OWN_PARTS,
        published={"train": 65_550, "validation": 22_628, "test": 22_735},
        ranges=ranges_of(("validation", 0), ("test", 0, 22_735)),
        cases=labels("label", (0, 0), (1, 1), (5, 5)),
        id_feature="filename",
    ),
    "kitti_distance": Made(
        dataset="kitti",
        version="3.3.0",
        picture=Picture(height=375, width=1242, image_format="PNG"),
        counts=OWN,
        parts=OWN_PARTS,
        published={"train": 6347, "validation": 423, "test": 711},
        ranges=ranges_of(("validation", 0), ("test", 0, 711)),
        cases=[
            *((kitti((0, 8.0), (1, 30.0)), 0), (kitti((3, 1.0), (2, 8.5)), 1), (kitti((1, 20.0)), 1)),
            *((kitti((0, 20.5), (5, 3.0)), 2), (kitti((3, 4.0), (7, 9.0)), 3), (kitti(), 3), (kitti((0, -1.5)), 0)),
        ],
        id_feature="image/file_name",
        original_name="{:06d}.png",
        class_names={
            "objects-type": ("Car", "Van", "Truck", "Pedestrian", "Person_sitting", "Cyclist", "Tram", "Misc"),
            "objects-occluded": ("fully visible", "partly occluded", "largely occluded", "unknown"),
        },
    ),
    "dsprites_location": Made(**DSPRITE, cases=labels("label_x_position", (0, 0), (1, 0), (2, 1), (31, 15))),
    "dsprites_orientation": Made(
        **DSPRITE,
        # Floors of the value over 2.5.
        cases=labels("label_orientation", (0, 0), (2, 0), (3, 1), (4, 1), (5, 2), (7, 2), (8, 3), (39, 15)),
    ),
    "smallnorb_azimuth": Made(**NORB, cases=labels("label_azimuth", (0, 0), (17, 17), (9, 9))),
    "smallnorb_elevation": Made(**NORB, cases=labels("label_elevation", (0, 0), (8, 8))),
}


def case_image(task: str, case: int) -> bytes:
    """The image of a case, as TFDS stores it."""
    return image(MADE[task].picture, case, binary="dsprites" in task)


def original_name(task: str, case: int) -> str:
    """The name of a case's image in the original dataset; empty if there is none."""
    made = MADE[task]
    return made.original_name.format(case) if made.id_feature else ""


def write(root: Path, task: str) -> None:
    """TFDS's files for a task: example number n of a split has case n modulo the number of cases."""
    made = MADE[task]
    name, _, config = made.dataset.partition("/")
    records = []
    for case, (features, _) in enumerate(made.cases):
        own: dict[str, Sequence[Value]] = {"image": [case_image(task, case)]}
        if made.id_feature:
            own[made.id_feature] = [original_name(task, case).encode()]
        records.append(example({**made.beside, **own, **features}))
    unused = example({"image": [b"no image"]})
    pieces = [piece for part in made.parts.values() for piece in part]
    taken = {(split, number) for split, first, end in pieces for number in range(first, end)}
    splits = {
        split: [records[number % len(records)] if (split, number) in taken else unused for number in range(count)]
        for split, count in made.counts.items()
    }
    folder = write_prepared(root, name, splits, version=made.version, config=config)
    for feature, found in made.class_names.items():
        (folder / f"{feature}.labels.txt").write_text("".join(f"{one}\n" for one in found))
