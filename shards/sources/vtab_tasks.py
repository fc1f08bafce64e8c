"""The 19 tasks of VTAB-1k: the dataset of each in TFDS, its parts, and how its label follows from an example.

Zhai et al., "A Large-scale Study of Representation Learning with the Visual Task Adaptation Benchmark"
(arXiv:1910.04867). The rules are those of its code, github.com/google-research/task_adaptation: `task_adaptation/data/`
has a file for each dataset, `scripts/run_all_tasks.sh` the arguments of each task. The features are those of the
dataset's builder in github.com/tensorflow/datasets.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from shards.sources.tfds import DatasetKey, Feature

NUM_TRAIN, NUM_VALIDATION = 800, 200
_Numbers = Sequence[float]


@dataclass(frozen=True, kw_only=True)
class ExampleRange:
    """Examples first..end-1 of one of TFDS's splits."""

    split: str
    first: int
    end: int


@dataclass(frozen=True, kw_only=True)
class Parts:
    """How a task divides TFDS's splits.

    The first 800 examples of `train` train. The 200 for validation are the first of `validation`, after
    `train_percent` % of it if that is `train` itself. The test set is `test`: what lies after both percentages if that
    is `train`, otherwise what lies after `test_skips_percent` %.
    """

    validation: str = "validation"
    test: str = "test"
    train_percent: int = 0
    validation_percent: int = 0
    test_skips_percent: int = 0

    @property
    def splits(self) -> tuple[str, ...]:
        """The splits that are read."""
        return tuple(dict.fromkeys(("train", self.validation, self.test)))

    def pieces(self, part: str, counts: Mapping[str, int]) -> list[ExampleRange]:
        """The examples of a part: train800, val200, train (both) or test. `counts`: the examples of each split."""
        begin = self.train_percent * counts["train"] // 100
        train = ExampleRange(split="train", first=0, end=NUM_TRAIN)
        validation = ExampleRange(split=self.validation, first=begin, end=begin + NUM_VALIDATION)
        num_test = counts[self.test]
        if self.test == "train":
            first = begin + self.validation_percent * num_test // 100
        else:
            first = round(self.test_skips_percent * num_test / 100)  # as TFDS rounds test[50%:]
        test = ExampleRange(split=self.test, first=first, end=num_test)
        return {"train800": [train], "val200": [validation], "train": [train, validation], "test": [test]}[part]


@dataclass(frozen=True, kw_only=True)
class TaskData:
    """Where a task's images and labels come from.

    `label` makes the class from the values of `features`, in this order; ValueError if it has none. `id_feature`: the
    example's name in the original dataset. `class_names` are in the order of the classes; without them, TFDS's own
    names of the first feature are taken, or the numbers. `is_binary`: the pixels are 0 and 1.
    """

    name: str
    dataset: DatasetKey
    num_classes: int
    parts: Parts
    features: tuple[str, ...] = ("label",)
    label: Callable[..., int]
    id_feature: str = ""
    class_names: tuple[str, ...] = ()
    is_binary: bool = False

    def label_of(self, example: Mapping[str, Feature]) -> int:
        """The class of an example, 0 to num_classes - 1; ValueError if it has none of these."""
        values = []
        for name in self.features:
            if name not in example:
                raise ValueError(f"it has no feature {name!r}")
            feature = example[name]
            if not all(isinstance(value, int | float) for value in feature):
                raise ValueError(f"its feature {name!r} has bytes, not numbers")
            values.append(feature)
        label = self.label(*values)
        if not 0 <= label < self.num_classes:
            raise ValueError(f"its label is {label}; allowed: 0 to {self.num_classes - 1}")
        return label


def _single(values: _Numbers) -> int:
    """The one value of a feature that TFDS calls a ClassLabel."""
    if len(values) != 1 or not isinstance(values[0], int):
        raise ValueError(f"its label is {len(values)} values; allowed: one whole number")
    return values[0]


def _in_pairs(values: _Numbers) -> int:
    """dsprites.py: 32 positions in 16 classes."""
    return _single(values) // 2


def _sixteenths_of_40(values: _Numbers) -> int:
    """dsprites.py: 40 orientations in 16 classes, of two or three orientations each."""
    return _single(values) * 2 // 5


def _number_of_objects(sizes: _Numbers) -> int:
    """clevr.py, count_all: from three objects on."""
    return len(sizes) - 3


def _highest_below(distance: float, thresholds: Sequence[float]) -> int:
    """The last threshold below the distance; -1 if there is none."""
    if not math.isfinite(distance):
        raise ValueError(f"its distance is {distance}")
    return sum(threshold < distance for threshold in thresholds) - 1


def _closest_object(pixel_coords: _Numbers) -> int:
    """clevr.py, closest_object_distance: the least of the third coordinates."""
    if not pixel_coords or len(pixel_coords) % 3:
        raise ValueError(f"its objects have {len(pixel_coords)} coordinates; allowed: 3 for each, of one or more")
    return _highest_below(_least(pixel_coords[2::3]), (0.0, 8.0, 8.5, 9.0, 9.5, 10.0, 100.0))


def _closest_vehicle(types: _Numbers, locations: _Numbers) -> int:
    """kitti.py, closest_vehicle_distance: the least z of cars, vans and trucks (types 0 to 2), 1,000 without any."""
    if len(locations) != 3 * len(types):
        raise ValueError(f"its {len(types)} objects have {len(locations)} coordinates; allowed: 3 for each")
    depths = [depth for kind, depth in zip(types, locations[2::3], strict=True) if kind < 3]
    return _highest_below(_least([*depths, 1000.0]), (-100.0, 8.0, 20.0, 999.0))


def _least(distances: _Numbers) -> float:
    if any(math.isnan(distance) for distance in distances):
        raise ValueError("one of its distances is not a number")
    return min(distances)


def _of_train(percent: int) -> Parts:
    """The validation part lies in `train`, after this percentage."""
    return Parts(validation="train", train_percent=percent)


_SIXTY_TWENTY = Parts(validation="train", test="train", train_percent=60, validation_percent=20)


_CLEVR_COUNT = TaskData(
    name="clevr_count",
    dataset=DatasetKey(name="clevr", majors=(3,)),
    num_classes=8,
    parts=Parts(validation="train", train_percent=90, test="validation"),
    features=("objects/size",),
    label=_number_of_objects,
    id_feature="file_name",
    class_names=tuple(f"{number} objects" for number in range(3, 11)),
)


_DSPRITES_LOCATION = TaskData(
    name="dsprites_location",
    dataset=DatasetKey(name="dsprites", majors=(2,)),
    num_classes=16,
    parts=Parts(validation="train", test="train", train_percent=80, validation_percent=10),
    features=("label_x_position",),
    label=_in_pairs,
    id_feature="id",
    is_binary=True,
)


_SMALLNORB_AZIMUTH = TaskData(
    name="smallnorb_azimuth",
    dataset=DatasetKey(name="smallnorb", majors=(2,)),
    num_classes=18,
    parts=Parts(validation="test", test_skips_percent=50),
    features=("label_azimuth",),
    label=_single,
    id_feature="id",
    class_names=tuple(f"{20 * number} degrees" for number in range(18)),
)


VTAB_TASKS = (
    TaskData(
        name="caltech101",
        dataset=DatasetKey(name="caltech101", majors=(3,)),
        num_classes=102,
        parts=_of_train(90),
        label=_single,
        id_feature="image/file_name",
    ),
    TaskData(
        name="cifar100",
        dataset=DatasetKey(name="cifar100", majors=(3,)),
        num_classes=100,
        parts=_of_train(90),
        label=_single,
        id_feature="id",
    ),
    TaskData(
        name="dtd",
        dataset=DatasetKey(name="dtd", majors=(3,)),
        num_classes=47,
        parts=Parts(),
        label=_single,
        id_feature="file_name",
    ),
    TaskData(
        name="flowers102",
        dataset=DatasetKey(name="oxford_flowers102", majors=(2,)),
        num_classes=102,
        parts=Parts(),
        label=_single,
        id_feature="file_name",
    ),
    TaskData(
        name="pets",
        # Version 4 repaired 12 images; keys and splits are those of version 3, which TFDS no longer makes.
        dataset=DatasetKey(name="oxford_iiit_pet", majors=(3, 4)),
        num_classes=37,
        parts=_of_train(80),
        label=_single,
        id_feature="file_name",
    ),
    TaskData(
        name="sun397",
        dataset=DatasetKey(name="sun397", config="tfds", majors=(4,)),
        num_classes=397,
        parts=Parts(),
        label=_single,
        id_feature="file_name",
    ),
    TaskData(
        name="svhn",
        dataset=DatasetKey(name="svhn_cropped", majors=(3,)),
        num_classes=10,
        parts=_of_train(90),
        label=_single,
        id_feature="id",
    ),
    TaskData(
        name="patch_camelyon",
        dataset=DatasetKey(name="patch_camelyon", majors=(2,)),
        num_classes=2,
        parts=Parts(),
        label=_single,
        id_feature="id",
    ),
    TaskData(
        name="eurosat",
        dataset=DatasetKey(name="eurosat", config="rgb", majors=(2,)),
        num_classes=10,
        parts=_SIXTY_TWENTY,
        label=_single,
        id_feature="filename",
    ),
    TaskData(
        name="resisc45",
        dataset=DatasetKey(name="resisc45", majors=(3,)),
        num_classes=45,
        parts=_SIXTY_TWENTY,
        label=_single,
        id_feature="filename",
    ),
    TaskData(
        name="retinopathy",
        dataset=DatasetKey(name="diabetic_retinopathy_detection", config="btgraham-300", majors=(3,)),
        num_classes=5,
        parts=Parts(),
        label=_single,
        id_feature="name",
    ),
    _CLEVR_COUNT,
    replace(
        _CLEVR_COUNT,
        name="clevr_distance",
        num_classes=6,
        features=("objects/pixel_coords",),
        label=_closest_object,
        class_names=("up to 8", "8 to 8.5", "8.5 to 9", "9 to 9.5", "9.5 to 10", "above 10"),
    ),
    TaskData(
        name="dmlab",
        dataset=DatasetKey(name="dmlab", majors=(2,)),
        num_classes=6,
        parts=Parts(),
        label=_single,
        id_feature="filename",
    ),
    TaskData(
        name="kitti_distance",
        dataset=DatasetKey(name="kitti", majors=(3,)),
        num_classes=4,
        parts=Parts(),
        features=("objects/type", "objects/location"),
        label=_closest_vehicle,
        id_feature="image/file_name",
        class_names=("up to 8 m", "8 to 20 m", "above 20 m", "no vehicle"),
    ),
    _DSPRITES_LOCATION,
    replace(_DSPRITES_LOCATION, name="dsprites_orientation", features=("label_orientation",), label=_sixteenths_of_40),
    _SMALLNORB_AZIMUTH,
    replace(
        _SMALLNORB_AZIMUTH,
        name="smallnorb_elevation",
        num_classes=9,
        features=("label_elevation",),
        class_names=tuple(f"{30 + 5 * number} degrees" for number in range(9)),
    ),
)
