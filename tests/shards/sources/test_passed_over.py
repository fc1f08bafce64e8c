"""What is said of files that a source does not read."""

import logging
import tarfile
from pathlib import Path

import pytest

from shards.adoption.tar_lists import find_tars
from shards.sources.archives import ClassTarsSource, TarOfTarsSource
from shards.sources.folders import FolderSource

FILES = ("n01.tar", "n07.zip", "n08.ZIP", "n09/1.jpg", "LICENSE.txt", ".n10.zip", "labels.csv.gz")


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
