"""The 19 tasks of VTAB-1k: the TFDS dataset of each, how the task divides it, and how an example's label is computed.

Zhai et al., "A Large-scale Study of Representation Learning with the Visual Task Adaptation Benchmark"
(arXiv:1910.04867). The rules are those of its code, github.com/google-research/task_adaptation: `task_adaptation/data/`
has a file for each dataset, and `scripts/run_all_tasks.sh` has the arguments of each task. The features are those of
the dataset's builder in github.com/tensorflow/datasets.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from shards.sources.tfds import DatasetKey, Feature

NUM_TRAIN, NUM_VALIDATION = 800, 200
_Numbers = Sequence[float]


@dataclass(frozen=True, kw_only=True)
class ExampleRange:
    """Examples first..end-1 of a TFDS split."""

    split: str
    first: int
    end: int


@dataclass(frozen=True, kw_only=True)
class Parts:
    """How a task divides TFDS's splits.

    The first 800 examples of TFDS's split `train` are for training. The 200 for validation are the first ones of the
    split named by `validation` or, if that is `train`, those after `train_percent` % of it. The test set is the split
    named by `test`. If that is `train`, the test set begins after both percentages, otherwise after
    `test_skips_percent` %.
    """

    validation: str = "validation"
    test: str = "test"
    train_percent: int = 0
    validation_percent: int = 0
    test_skips_percent: int = 0

    @property
    def splits(self) -> tuple[str, ...]:
        """The TFDS splits that the task uses."""
        return tuple(dict.fromkeys(("train", self.validation, self.test)))

    def pieces(self, part: str, counts: Mapping[str, int]) -> list[ExampleRange]:
        """Returns the examples of train800, val200, train (both) or test. `counts`: the number of examples of each TFDS
        split."""
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
    """Says where a task's images and labels come from.

    `label` computes the class from the values of `features`, in this order, and raises ValueError if they give none.
    `id_feature` is the feature with the example's name in the original dataset. `class_names` are in the order of the
    classes; if they are empty, TFDS's names for the first feature are used, or the numbers. `is_binary`: whether the
    pixels are 0 and 1.
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
        """Returns the class of an example, 0 to num_classes - 1. Raises ValueError if the example has none of these
        classes."""
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
    """Returns the value of a feature that is a single whole number, such as TFDS's ClassLabel."""
    if len(values) != 1 or not isinstance(values[0], int):
        raise ValueError(f"its label is {len(values)} values; allowed: one whole number")
    return values[0]


def _in_pairs(values: _Numbers) -> int:
    """Returns one of 16 classes for one of 32 positions (dsprites.py)."""
    return _single(values) // 2


def _sixteenths_of_40(values: _Numbers) -> int:
    """Returns one of 16 classes for one of 40 orientations. A class has two or three orientations (dsprites.py)."""
    return _single(values) * 2 // 5


def _number_of_objects(sizes: _Numbers) -> int:
    """Returns the number of objects minus three, the smallest number (clevr.py, count_all)."""
    return len(sizes) - 3


def _highest_below(distance: float, thresholds: Sequence[float]) -> int:
    """Returns the number of the last threshold below the distance, or -1 if there is none."""
    if not math.isfinite(distance):
        raise ValueError(f"its distance is {distance}")
    return sum(threshold < distance for threshold in thresholds) - 1


def _closest_object(pixel_coords: _Numbers) -> int:
    """Returns the class of the closest object's distance: the smallest third coordinate (clevr.py,
    closest_object_distance)."""
    if not pixel_coords or len(pixel_coords) % 3:
        raise ValueError(f"its objects have {len(pixel_coords)} coordinates; allowed: 3 for each, of one or more")
    return _highest_below(_least(pixel_coords[2::3]), (0.0, 8.0, 8.5, 9.0, 9.5, 10.0, 100.0))


def _closest_vehicle(types: _Numbers, locations: _Numbers) -> int:
    """Returns the class of the closest vehicle's distance: the smallest z of cars, vans and trucks (types 0 to 2), or
    1,000 if there are none (kitti.py, closest_vehicle_distance)."""
    if len(locations) != 3 * len(types):
        raise ValueError(f"its {len(types)} objects have {len(locations)} coordinates; allowed: 3 for each")
    depths = [depth for kind, depth in zip(types, locations[2::3], strict=True) if kind < 3]
    return _highest_below(_least([*depths, 1000.0]), (-100.0, 8.0, 20.0, 999.0))


def _least(distances: _Numbers) -> float:
    if any(math.isnan(distance) for distance in distances):
        raise ValueError("one of its distances is not a number")
    return min(distances)


def _of_train(percent: int) -> Parts:
    """Returns the parts of a task whose validation images come from `train`, after `percent` % of it."""
    return Parts(validation="train", train_percent=percent)


def _labelled(rows: Sequence[tuple[str, str, tuple[int, ...], int, Parts, str]]) -> Iterator[TaskData]:
    """Yields the tasks whose class is TFDS's own label."""
    for name, folder, majors, num_classes, parts, id_feature in rows:
        dataset, _, config = folder.partition("/")
        yield TaskData(
            name=name,
            dataset=DatasetKey(name=dataset, config=config, majors=majors),
            num_classes=num_classes,
            parts=parts,
            label=_single,
            id_feature=id_feature,
        )


_SIXTY_TWENTY = Parts(validation="train", test="train", train_percent=60, validation_percent=20)
# The task, its folder in TFDS, the major versions, the number of classes, the parts, and the feature with the example's
# name. Version 4 of oxford_iiit_pet repaired 12 images; its keys and splits are those of version 3, which TFDS no
# longer builds.
_LABELLED = (
    ("caltech101", "caltech101", (3,), 102, _of_train(90), "image/file_name"),
    ("cifar100", "cifar100", (3,), 100, _of_train(90), "id"),
    ("dtd", "dtd", (3,), 47, Parts(), "file_name"),
    ("flowers102", "oxford_flowers102", (2,), 102, Parts(), "file_name"),
    ("pets", "oxford_iiit_pet", (3, 4), 37, _of_train(80), "file_name"),
    ("sun397", "sun397/tfds", (4,), 397, Parts(), "file_name"),
    ("svhn", "svhn_cropped", (3,), 10, _of_train(90), "id"),
    ("patch_camelyon", "patch_camelyon", (2,), 2, Parts(), "id"),
    ("eurosat", "eurosat/rgb", (2,), 10, _SIXTY_TWENTY, "filename"),
    ("resisc45", "resisc45", (3,), 45, _SIXTY_TWENTY, "filename"),
    ("retinopathy", "diabetic_retinopathy_detection/btgraham-300", (3,), 5, Parts(), "name"),
)
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
_CLEVR_DISTANCE = replace(
    _CLEVR_COUNT,
    name="clevr_distance",
    num_classes=6,
    features=("objects/pixel_coords",),
    label=_closest_object,
    class_names=("up to 8", "8 to 8.5", "8.5 to 9", "9 to 9.5", "9.5 to 10", "above 10"),
)
_KITTI_DISTANCE = TaskData(
    name="kitti_distance",
    dataset=DatasetKey(name="kitti", majors=(3,)),
    num_classes=4,
    parts=Parts(),
    features=("objects/type", "objects/location"),
    label=_closest_vehicle,
    id_feature="image/file_name",
    class_names=("up to 8 m", "8 to 20 m", "above 20 m", "no vehicle"),
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
_SMALLNORB_ELEVATION = replace(
    _SMALLNORB_AZIMUTH,
    name="smallnorb_elevation",
    num_classes=9,
    features=("label_elevation",),
    class_names=tuple(f"{30 + 5 * number} degrees" for number in range(9)),
)
VTAB_TASKS = (
    *_labelled(_LABELLED),
    _CLEVR_COUNT,
    _CLEVR_DISTANCE,
    *_labelled([("dmlab", "dmlab", (2,), 6, Parts(), "filename")]),
    _KITTI_DISTANCE,
    _DSPRITES_LOCATION,
    replace(_DSPRITES_LOCATION, name="dsprites_orientation", features=("label_orientation",), label=_sixteenths_of_40),
    _SMALLNORB_AZIMUTH,
    _SMALLNORB_ELEVATION,
)
