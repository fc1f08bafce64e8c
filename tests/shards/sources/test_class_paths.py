"""Folders further down: which of them is the class, and what is said if it could be another one."""

import io
import logging
import tarfile
from pathlib import Path
from typing import Any

import pytest

from shards.sources.archives import ClassTarsSource, TarOfTarsSource
from shards.sources.class_paths import ClassLevel, ClassPaths
from shards.sources.folders import FolderSource
from shards.store import open_store

PLACES = ("a/airfield", "a/abbey", "b/bakery/shop", "s/swimming_pool/indoor", "s/swimming_pool/outdoor")
SAID = "if the sub-folders are the classes, give --source.class-level deepest"


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
