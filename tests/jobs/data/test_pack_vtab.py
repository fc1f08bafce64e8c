"""Each task of VTAB-1k, packed by its recipe from a made dataset in TFDS's form (tests/rigs/vtab_tasks.py)."""

import hashlib
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from jobs.data.pack import run
from jobs.recipes.pack import RECIPES
from jobs.recipes.paper_vtab import TASKS
from jobs.settings.data import PackJob
from shards.dataset import open_dataset
from shards.errors import UserError
from shards.sources.kinds import VtabSource
from shards.sources.vtab_tasks import VTAB_TASKS, TaskData
from shards.store import open_store
from tests.rigs.prepared import Value, example, write_prepared
from tests.rigs.vtab_tasks import MADE, case_image, clevr, kitti, original_name, write


def png(number: int, *, mode: str = "RGB") -> bytes:
    """A tiny picture."""
    file = io.BytesIO()
    pixels = np.array([[0, 1], [number % 2, number // 2 % 2]], np.uint8)
    if mode == "RGB":
        pixels = np.full((2, 2, 3), 10 * number, np.uint8)
    Image.fromarray(pixels).save(file, format="PNG")
    return file.getvalue()


def packed(task: str, root: Path, out: Path, **changes: object) -> list[tuple[str, bytes, tuple[int, ...]]]:
    """What the recipe packs of a task: the source, the bytes and the labels of each sample."""
    job: PackJob = RECIPES["vtab"]()
    assert run(replace(job, source=source(task, root), out=str(out), **changes)) == 0  # type: ignore[arg-type]
    return sorted(samples(out))


def samples(out: Path) -> Iterator[tuple[str, bytes, tuple[int, ...]]]:
    """All samples of a dataset."""
    dataset = open_dataset(str(out))
    for shard in range(len(dataset.manifest.shards)):
        rows = dataset.sample_rows(shard)
        for row, (offset, size) in enumerate(zip(rows.offset.tolist(), rows.size.tolist(), strict=True)):
            image = dataset.shard_store.read_range(dataset.shard_path(shard), offset, offset + size)
            yield dataset.source_of(shard, row), image, rows.labels_of(row)


def pixels_of(found: tuple[str, bytes, tuple[int, ...]]) -> tuple[str, bytes, tuple[int, ...]]:
    """A sample with its pixels in place of the bytes of its image."""
    with Image.open(io.BytesIO(found[1])) as image:
        return found[0], image.tobytes(), found[2]


def expected(task: str, part: str) -> list[tuple[str, bytes, tuple[int, ...]]]:
    """The samples of a part, by hand: in a split of n, shard k of 3 begins at example n k // 3."""
    made, found = MADE[task], []
    for split, first, end in made.parts[part]:
        begins = [made.counts[split] * shard // 3 for shard in range(3)]
        for number in range(first, end):
            shard = sum(number >= begin for begin in begins) - 1
            case = number % len(made.cases)
            name = made.dataset.partition("/")[0]
            source = f"{name}-{split}.tfrecord-{shard:05d}-of-00003__{number - begins[shard]}"
            if own := original_name(task, case):
                source += f":{own}"
            found.append((source, case_image(task, case), (made.cases[case][1],)))
    return sorted(found)


def is_costly(task: str, part: str) -> bool:
    """1,000 large images are decoded when they are packed."""
    return part == "train" and MADE[task].picture.num_pixels > 10_000


@pytest.mark.parametrize(
    ("task", "part"),
    [
        pytest.param(task, part, marks=[pytest.mark.long] if is_costly(task, part) else [])
        for task in MADE
        for part in ("test", "train")
    ],
)
def test_images_and_labels_are_those_of_task_adaptation(task: str, part: str, tmp_path: Path) -> None:
    write(tmp_path / "tfds", task)
    found, wanted = packed(task, tmp_path / "tfds", tmp_path / "out", split=part), expected(task, part)
    if "dsprites" in task:
        found = [pixels_of(sample) for sample in found]
        wanted = [(name, bytes(255 * value for value in image), label) for name, image, label in map(pixels_of, wanted)]
    assert found == wanted
    (recipe,) = (one for one in TASKS if one.name == task)
    found_names = open_dataset(str(tmp_path / "out")).label_names
    assert len(found_names) == recipe.num_classes
    if "label" in MADE[task].class_names:
        assert found_names == tuple(MADE[task].class_names["label"])


@pytest.mark.parametrize("task", VTAB_TASKS, ids=lambda task: task.name)
def test_parts_of_the_published_datasets(task: TaskData) -> None:
    """The numbers of examples are those of task_adaptation's own tests, `task_adaptation/data/*_test.py`."""
    made = MADE[task.name]
    for part, wanted in made.ranges.items():
        (piece,) = task.parts.pieces(part, made.published)
        assert (piece.split, piece.first, piece.end) == wanted, part
    assert task.parts.pieces("train", made.published) == [
        *task.parts.pieces("train800", made.published),
        *task.parts.pieces("val200", made.published),
    ]


def source(task: str, root: Path, **changes: object) -> VtabSource:
    return replace(VtabSource(task=task, root=str(root)), **changes)  # type: ignore[arg-type]


def scanned(found: VtabSource) -> list[tuple[str, str, tuple[str, ...]]]:
    """Name, refusal (empty: none) and labels of every example, in the order of the scan."""
    images = found.images(list(found.entries()), max_bytes=1 << 20)
    return [(entry.name, "" if isinstance(image, bytes) else str(image), entry.labels) for entry, image in images]


def test_parts_for_tuning_make_the_training_set_in_the_order_of_tfds(tmp_path: Path) -> None:
    write(tmp_path, "svhn")
    first, second, both = (scanned(source("svhn", tmp_path, split=part)) for part in ("train800", "val200", "train"))
    assert (len(first), len(second)) == (800, 200)
    assert both == first + second
    assert [name.partition(":")[0] for name, _, _ in both] == [
        f"svhn_cropped-train.tfrecord-{number // 670:05d}-of-00003__{number % 670}"  # three shards of 670
        for number in (*range(800), *range(1809, 2009))
    ]


def test_the_tasks_are_those_of_the_recipes() -> None:
    assert [task.name for task in VTAB_TASKS] == [task.name for task in TASKS] == list(MADE)
    assert [task.num_classes for task in VTAB_TASKS] == [task.num_classes for task in TASKS]


def test_classes_have_tfds_names_if_it_has_written_them(tmp_path: Path) -> None:
    write(tmp_path, "svhn")
    assert source("svhn", tmp_path).known_labels() == tuple("0123456789")
    names = tmp_path / "svhn_cropped" / "3.1.0" / "label.labels.txt"
    names.write_text("".join(f"digit {number}\n" for number in range(10)))
    assert source("svhn", tmp_path).known_labels()[9] == "digit 9"
    assert scanned(source("svhn", tmp_path, split="test"))[0][2] == ("digit 9",)
    for text, message in (("a\nb\n", "has 2 names; allowed: 10"), ("a\n" * 10, "both named 'a'; allowed: 10 names")):
        names.write_text(text)
        with pytest.raises(UserError, match=message):
            source("svhn", tmp_path).known_labels()


@pytest.mark.parametrize(
    ("task", "features", "reason"),
    [
        ("svhn", {"image": [b"x"], "label": [10]}, "its label is 10; allowed: 0 to 9"),
        ("svhn", {"image": [b"x"], "label": [-1]}, "its label is -1; allowed"),
        ("svhn", {"image": [b"x"], "label": [1, 2]}, "its label is 2 values; allowed: one whole number"),
        ("svhn", {"image": [b"x"], "label": [1.0]}, "its label is 1 values; allowed: one whole number"),
        ("svhn", {"image": [b"x"], "label": [b"1"]}, "its feature 'label' has bytes, not numbers"),
        ("svhn", {"image": [b"x"]}, "it has no feature 'label'"),
        ("svhn", {"label": [1]}, "its feature 'image' has 0 values"),
        ("svhn", {"image": [b"x", b"y"], "label": [1]}, "its feature 'image' has 2 values"),
        ("svhn", {"image": [1], "label": [1]}, "its feature 'image' has 1 values; allowed: the bytes of one image"),
        ("svhn", {"image": [b"x" * (1 << 21)], "label": [1]}, "too large: 2097"),
        ("clevr_count", {"image": [b"x"], "objects/size": [0, 1]}, "its label is -1; allowed: 0 to 7"),
        ("clevr_count", {"image": [b"x"], "objects/size": [0] * 11}, "its label is 8; allowed: 0 to 7"),
        ("clevr_distance", {"image": [b"x"], **clevr()}, "its objects have 0 coordinates"),
        ("clevr_distance", {"image": [b"x"], "objects/pixel_coords": [1.0] * 4}, "its objects have 4 coordinates"),
        ("clevr_distance", {"image": [b"x"], **clevr(0.0)}, "its label is -1; allowed: 0 to 5"),
        ("clevr_distance", {"image": [b"x"], **clevr(100.5)}, "its label is 6; allowed: 0 to 5"),
        ("clevr_distance", {"image": [b"x"], **clevr(9.0, float("nan"))}, "one of its distances is not a number"),
        ("kitti_distance", {"image": [b"x"], **kitti((0, -100.5))}, "its label is -1; allowed: 0 to 3"),
        ("kitti_distance", {"image": [b"x"], **kitti((0, float("-inf")))}, "its distance is -inf"),
        (
            "kitti_distance",
            {"image": [b"x"], "objects/type": [0], "objects/location": []},
            "its 1 objects have 0 coord",
        ),
        ("dsprites_location", {"image": [png(3, mode="RGB")], "label_x_position": [0]}, "an image of mode RGB"),
        ("dsprites_location", {"image": [b"\x89PNG\r\n\x1a\n"], "label_x_position": [0]}, "truncated"),
        ("dsprites_location", {"image": [png(2, mode="L")], "label_x_position": [32]}, "its label is 16; allowed"),
    ],
)
def test_an_example_that_is_none_of_the_task_is_refused(
    task: str, features: Mapping[str, Sequence[Value]], reason: str, tmp_path: Path
) -> None:
    ((_, refusal, _),) = refused_by(task, example(features), tmp_path)
    assert reason in refusal


def refused_by(task: str, record: bytes, root: Path) -> list[tuple[str, str, tuple[str, ...]]]:
    """The scan of a test set of this one record."""
    made, parts = MADE[task], next(one.parts for one in VTAB_TASKS if one.name == task)
    splits = {split: [record] if split == parts.test else [b""] for split in parts.splits}
    name, _, config = made.dataset.partition("/")
    write_prepared(root, name, splits, version=made.version, config=config, num_shards=1)
    return scanned(source(task, root, split="test"))


def test_pixels_above_1_are_no_dsprites(tmp_path: Path) -> None:
    file = io.BytesIO()
    Image.fromarray(np.array([[0, 255]], np.uint8)).save(file, format="PNG")
    record = example({"image": [file.getvalue()], "label_x_position": [3]})
    assert "its pixels go up to 255; allowed: 0 and 1" in refused_by("dsprites_location", record, tmp_path)[0][1]


@pytest.mark.parametrize(
    ("edit", "refused", "reason"),
    [
        (lambda data: data[:40] + b"\xff" + data[41:], 1, "the checksum of its data is wrong"),
        (lambda data: data[: len(data) // 2], 2, "record 1 is cut off"),
        (lambda data: b"\xff" + data[1:], 3, "the checksum of the length of record 0 is wrong"),
        (lambda data: data[: 16 + int.from_bytes(data[:8], "little")], 2, "it ends before example 1 of 3"),
    ],
)
def test_a_damaged_shard_loses_only_what_cannot_be_read(
    edit: Callable[[bytes], bytes], refused: int, reason: str, tmp_path: Path
) -> None:
    write(tmp_path, "dtd")  # the test set has three shards of three examples
    path = tmp_path / "dtd" / "3.0.1" / "dtd-test.tfrecord-00001-of-00003"
    path.write_bytes(edit(path.read_bytes()))
    found = scanned(source("dtd", tmp_path, split="test"))
    reasons = [why for _, why, _ in found if why]
    assert (len(found), len(reasons)) == (9, refused)
    assert all(reason in why for why in reasons)
    assert all("00001-of-00003__" in name for name, why, _ in found if why)


@pytest.mark.long
def test_a_task_in_a_bucket(tmp_path: Path, s3_bucket: str) -> None:
    write(tmp_path, "dsprites_location")
    store = open_store(f"s3://{s3_bucket}/tfds")
    for path in (tmp_path / "dsprites" / "2.0.0").iterdir():
        store.write(path.relative_to(tmp_path).as_posix(), path.read_bytes())
    job: PackJob = RECIPES["vtab"]()
    for root, out in ((str(tmp_path), tmp_path / "a"), (store.url, tmp_path / "b")):
        asked = VtabSource(task="dsprites_location", root=root)
        assert run(replace(job, source=asked, out=str(out), samples_per_shard=300, workers=2)) == 0
    assert list(samples(tmp_path / "a")) == list(samples(tmp_path / "b"))


def hard_links(root: Path, names: Sequence[str], *, seed: int = 0) -> None:
    """Files with these names, all of them the same image: tens of thousands of files cost only their names."""
    (root / ".image").write_bytes(png(seed))
    for folder in {Path(name).parent for name in names}:
        (root / folder).mkdir(parents=True, exist_ok=True)
    for name in names:
        (root / name).hardlink_to(root / ".image")


EUROSAT = {  # the classes of EuroSAT, and how many images each has (Helber et al., 2019)
    **dict.fromkeys(("AnnualCrop", "Forest", "HerbaceousVegetation", "Residential", "SeaLake"), 3000),
    **dict.fromkeys(("Highway", "Industrial", "PermanentCrop", "River"), 2500),
    "Pasture": 2000,
}


def md5(text: str) -> str:
    return hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()


def test_originals_of_eurosat_are_chosen_and_ordered_as_tfds_does(tmp_path: Path) -> None:
    names = [f"{name}/{name}_{number + 1}.jpg" for name, count in EUROSAT.items() for number in range(count)]
    hard_links(tmp_path, names)
    # As TFDS shuffles: by the MD5 of the split's name and the key, as a number of 128 bits.
    keys = {int(md5(f"train{name.replace('/', '_')}"), 16): name for name in names}
    order = [keys[number] for number in sorted(keys)]
    # Fixed here: TFDS 4.9.10 itself has written this order, from files with these names.
    assert order[0] == "Forest/Forest_687.jpg"
    assert order[799] == "HerbaceousVegetation/HerbaceousVegetation_1371.jpg"
    assert (order[16_200], order[-1]) == ("SeaLake/SeaLake_804.jpg", "PermanentCrop/PermanentCrop_632.jpg")
    for split, wanted in (("train", order[:800] + order[16_200:16_400]), ("test", order[21_600:])):
        source = VtabSource(task="eurosat", originals=str(tmp_path), split=split)  # type: ignore[arg-type]
        found = list(source.entries())
        assert [(entry.name, entry.labels) for entry in found] == [(name, (name.partition("/")[0],)) for name in wanted]
        assert next(source.images(found[:1], max_bytes=1 << 20))[1] == png(0)
        assert list(source.reader().read_many([found[3].locator])) == [png(0)]
    assert source.known_labels() == tuple(sorted(EUROSAT))
    (tmp_path / names[0]).unlink()
    with pytest.raises(UserError, match=r"has 26,999 images of TFDS's split 'train'; eurosat has 27,000, and their"):
        list(source.entries())


@pytest.fixture(scope="module")
def listed_originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Lists like those of DTD and Pets, with the published numbers of images; the names are made up."""
    root = tmp_path_factory.mktemp("originals")
    for name, first in (("train1", 0), ("val1", 40), ("test1", 80)):
        lines = [
            f"c{label:02d}/c{label:02d}_{number}.jpg\n" for label in range(47) for number in range(first, first + 40)
        ]
        write_text(root / "dtd" / "labels" / f"{name}.txt", "".join(lines))
    for name, count in (("trainval", 3680), ("test", 3669)):
        lines = [f"Breed{number % 37:02d}_{number} {number % 37 + 1} 1 1\n" for number in range(count)]
        write_text(root / "pets" / "annotations" / f"{name}.txt", "".join(lines))
    return root


def write_text(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("task", "split", "first", "count"),
    [  # The first example by hand: the least MD5 of TFDS's split and key.
        ("dtd", "train", ("train", "dtd/labels/train1.txt"), 1000),
        ("dtd", "val200", ("validation", "dtd/labels/val1.txt"), 200),
        ("dtd", "test", ("test", "dtd/labels/test1.txt"), 1880),
        ("pets", "train", ("train", "pets/annotations/trainval.txt"), 1000),
        ("pets", "test", ("test", "pets/annotations/test.txt"), 3669),
    ],
)
def test_originals_in_lists_are_ordered_as_tfds_does(
    task: str, split: str, first: tuple[str, str], count: int, listed_originals: Path
) -> None:
    source = VtabSource(task=task, originals=str(listed_originals / task), split=split)  # type: ignore[arg-type]
    entries = list(source.entries())
    salt, path = first
    lines = [
        line.split(" ")[0].removesuffix(".jpg") for line in (listed_originals / path).read_text().split("\n") if line
    ]
    least = min(lines, key=lambda line: md5(f"{salt}{line}.jpg"))
    assert (len(entries), entries[0].locator) == (count, f"images/{least}.jpg")
    assert entries[0].labels == (least.partition("/")[0] if task == "dtd" else least.partition("_")[0],)
    assert len(source.known_labels()) == (47 if task == "dtd" else 37)
    assert all(isinstance(image, OSError) for _, image in source.images(entries[:2], max_bytes=1)), "there is no image"
