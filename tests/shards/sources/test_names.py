"""What the names of folders and files say: the class, the split, and what is not read."""

import io
import logging
import tarfile
from pathlib import Path
from typing import Any

import pytest

from jobs.data.pack import PackJob, run
from shards.adoption.tar_lists import find_tars
from shards.errors import UserError
from shards.sources.archives import ClassTarsSource, TarOfTarsSource
from shards.sources.folders import FolderSource
from shards.sources.names import ClassLevel, ClassPaths, refuse_mixed_splits, splits_among
from shards.store import open_store
from shards.what_is_there import no_dataset
from tests.rigs.images import image_bytes

PLACES = ("a/airfield", "a/abbey", "b/bakery/shop", "s/swimming_pool/indoor", "s/swimming_pool/outdoor")
SAID = "if the sub-folders are the classes, give --source.class-level deepest"
FILES = ("n01.tar", "n07.zip", "n08.ZIP", "n09/1.jpg", "LICENSE.txt", ".n10.zip", "labels.csv.gz")


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (("train", "val"), ("train", "val")),
        (("training_set", "test_set"), ("training_set", "test_set")),
        (("seg_train", "seg_test"), ("seg_train", "seg_test")),
        (("train2017", "val2017"), ("train2017", "val2017")),
        (("train_images", "val_images"), ("train_images", "val_images")),
        (("Train", "Eval"), ("Train", "Eval")),
        (("mnistTrain", "mnistTest"), ("mnistTrain", "mnistTest")),
        (("cat", "train", "val"), ("train", "val")),
        (("test",), ("test",)),
        (("train", "bus", "car"), ()),
        (("train", "unlabeled"), ("train", "unlabeled")),
        (("Test", "Extra"), ("Test", "Extra")),
        (("extra", "unlabeled"), ()),
        (("train", "extra", "car"), ()),
        (("train station", "test tube"), ()),
        (("validator", "trainer"), ()),
        (("test tube", "car"), ()),
        (("cat", "dog"), ()),
    ],
)
def test_names_that_are_splits(names: tuple[str, ...], found: tuple[str, ...]) -> None:
    assert set(splits_among(names)) == set(found)


def put(root: Path, *paths: str) -> str:
    for number, path in enumerate(paths):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(image_bytes(number))
    return str(root)


def test_files_of_several_splits_are_refused() -> None:
    for names in (("mnistTrain.parquet", "mnistTest.parquet"), ("a/train-0.parquet", "a/val-0.parquet")):
        with pytest.raises(UserError, match=r"are of the splits train .*, (test|validation) "):
            refuse_mixed_splits(names)
    refuse_mixed_splits(("train_val.parquet", "latest.parquet", "trainer.parquet"))


def test_other_folders_are_classes_and_parts_of_them(tmp_path: Path) -> None:
    root = put(tmp_path / "images", "train/a.jpg", "bus/b.jpg", "test tube/c.jpg", "bus/testing ground/d.jpg")
    assert run(PackJob(out=str(tmp_path / "out"), source=FolderSource(root=root))) == 0


def test_splits_of_plain_images_are_packed_with_flat(tmp_path: Path) -> None:
    """As Kaggle's competitions lie: no answer sends the user back to the folder above."""
    root = put(tmp_path / "kaggle", "train/cat.1.jpg", "train/dog.2.jpg", "test/3.jpg")
    with pytest.raises(UserError):
        run(PackJob(out=str(tmp_path / "out"), source=FolderSource(root=root)))
    with pytest.raises(UserError) as caught:
        run(PackJob(out=str(tmp_path / "out"), source=FolderSource(root=f"{root}/train")))
    assert "there is none; take patchline pack flat" in str(caught.value)
    assert "patchline pack flat --source.root" in str(no_dataset(root))


def test_two_folders_of_one_split_become_two_datasets(tmp_path: Path) -> None:
    root = put(tmp_path / "all", "dev/cat/0.png", "eval/cat/0.png", "train/cat/0.png")
    with pytest.raises(UserError) as caught:
        run(PackJob(out=str(tmp_path / "out"), source=FolderSource(root=root)))
    for name in ("dev", "eval", "train"):
        assert f"/{name} --split {name} --out DATA/{name}" in str(caught.value)
        assert f"/{name} --out data/all-{name} --split {name}" in str(no_dataset(root))


def folder(url: str, paths: tuple[str, ...]) -> str:
    store = open_store(url)
    for path in paths:
        for number in range(2):
            store.write(f"{path}/{number}.jpg", b"x")
    return url


def tar_of(members: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return file.getvalue()


def labels(source: Any) -> set[str]:
    """The classes of the images of a source, as the scan finds them."""
    return {label for entry, _ in source.images(list(source.entries()), max_bytes=100) for label in entry.labels}


@pytest.mark.parametrize("where", ["folder", "bucket"])
@pytest.mark.parametrize(
    ("level", "classes", "is_said"),
    [
        ("auto", {"a", "b", "s"}, True),
        ("first", {"a", "b", "s"}, False),
        ("deepest", {"airfield", "abbey", "shop", "indoor", "outdoor"}, False),
        ("path", set(PLACES), False),
    ],
)
def test_folders_two_levels_down(
    where: str,
    level: ClassLevel,
    classes: set[str],
    is_said: bool,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    caplog: pytest.LogCaptureFixture,
) -> None:
    url = str(tmp_path) if where == "folder" else f"s3://{request.getfixturevalue('s3_bucket')}"
    source = FolderSource(root=folder(url, PLACES), class_level=level)
    assert {label for entry in source.entries() for label in entry.labels} == classes
    assert (
        f"2 classes with images in two folders or more, such as 'a' with 'a/abbey' and 'a/airfield'; they stay one "
        f"class each; {SAID}" in caplog.text
    ) == is_said


@pytest.mark.parametrize(
    ("paths", "is_said"),
    [
        (("n01/images", "n02/images"), False),  # Tiny ImageNet
        (("cat", "dog"), False),
        (("cat", "dog/puppies"), False),
        (("cat", "other", "other/car"), True),
        (("images/cat", "images/dog"), True),
        (("Apple/healthy", "Apple/scab", "Tomato/healthy"), True),
    ],
)
def test_when_it_is_said(
    paths: tuple[str, ...], is_said: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    list(FolderSource(root=folder(str(tmp_path), paths)).entries())
    assert (SAID in caplog.text) == is_said


def test_two_folders_of_one_name_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = folder(str(tmp_path), ("library/indoor", "pool/indoor"))
    list(FolderSource(root=root, class_level="deepest").entries())
    said = "the folders 'library/indoor' and 'pool/indoor' are one class; --source.class-level path keeps them apart"
    assert said in caplog.text


TARS = {
    "a.tar": tar_of({"./airfield/1.jpg": b"x", "./abbey/1.jpg": b"x"}),
    "n01.tar": tar_of({"n01/1.jpg": b"x"}),
    "n02.tar": tar_of({"1.jpg": b"x"}),
}


@pytest.mark.parametrize("kind", ["folder", "tar"])
@pytest.mark.parametrize(
    ("level", "classes"),
    [
        ("auto", {"a", "n01", "n02"}),
        ("first", {"a", "n01", "n02"}),
        ("deepest", {"airfield", "abbey", "n01", "n02"}),
        ("path", {"a/airfield", "a/abbey", "n01", "n02"}),
    ],
)
def test_folders_in_tars(
    kind: str, level: ClassLevel, classes: set[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source: ClassTarsSource | TarOfTarsSource
    if kind == "tar":
        (tmp_path / "all.tar").write_bytes(tar_of(TARS))
        source = TarOfTarsSource(path=str(tmp_path / "all.tar"), class_level=level)
    else:
        for name, data in TARS.items():
            (tmp_path / name).write_bytes(data)
        source = ClassTarsSource(root=str(tmp_path), class_level=level)
    assert labels(source) == classes
    assert (SAID in caplog.text) == (level == "auto")


@pytest.mark.parametrize(("level", "classes"), [("auto", {"indoor"}), ("path", {"library/indoor", "pool/indoor"})])
def test_tars_of_one_name(
    level: ClassLevel, classes: set[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("library", "pool"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "indoor.tar").write_bytes(TARS["n02.tar"])
    assert labels(ClassTarsSource(root=str(tmp_path), class_level=level)) == classes
    assert ("are one class; --source.class-level path" in caplog.text) == (level == "auto")


def test_many_merged_folders_are_named_a_few_times(caplog: pytest.LogCaptureFixture) -> None:
    paths = ClassPaths("deepest")
    with caplog.at_level(logging.WARNING):
        for number in range(100):
            paths.class_of(f"site{number}/cat")
    assert len(caplog.records) == 10


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in FILES:
        (tmp_path / "all" / name).parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(tmp_path / "all" / name, "w"):
            pass
    return tmp_path / "all"


def said(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [
        record.getMessage().partition(": ")[2].partition(";")[0] for record in caplog.records if record.levelno == level
    ]


@pytest.mark.parametrize("kind", ["folder", "tar"])
def test_archives_and_images_beside_class_tars(kind: str, root: Path, caplog: pytest.LogCaptureFixture) -> None:
    source: ClassTarsSource | TarOfTarsSource = ClassTarsSource(root=str(root))
    if kind == "tar":
        with tarfile.open(root.parent / "all.tar", "w") as archive:
            for name in sorted(FILES):
                archive.add(root / name, name)
        source = TarOfTarsSource(path=str(root.parent / "all.tar"))
    with caplog.at_level(logging.INFO):
        assert [entry.labels for entry in source.entries()] == [("n01",)]
    assert said(caplog, logging.WARNING) == [
        "passed over 1 .ZIP file without the suffix .tar, such as n08.ZIP",
        "passed over 1 .jpg file without the suffix .tar, such as n09/1.jpg",
        "passed over 1 .zip file without the suffix .tar, such as n07.zip",
    ]
    assert said(caplog, logging.INFO) == ["skipped 2 files without the suffix .tar: 1 .gz, 1 .txt"]


def test_archives_beside_class_folders(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert [entry.labels for entry in FolderSource(root=str(root)).entries()] == [("n09",)]
    assert "passed over 1 .zip file with no image suffix, such as n07.zip" in said(caplog, logging.WARNING)
    assert said(caplog, logging.INFO) == ["skipped 2 files with no image suffix: 1 .gz, 1 .txt"]


def test_archives_beside_tars_to_be_indexed(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert [tar.path for tar in find_tars(str(root))] == ["n01.tar"]
    assert [line.partition(",")[0] for line in said(caplog, logging.WARNING)] == [
        "passed over 1 .ZIP file without the suffix .tar",
        "passed over 1 .zip file without the suffix .tar",
    ]
