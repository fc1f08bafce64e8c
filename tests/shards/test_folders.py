"""Class folders and flat folders: what is listed, in what order, under which label."""

import os
from pathlib import Path

import pytest

from shards.errors import UserError
from shards.folders import FlatSource, FolderSource
from tests.rigs.images import class_folders, image_bytes


def test_class_folders_are_listed_in_order_with_their_label(tmp_path: Path) -> None:
    root = class_folders(tmp_path, num_classes=2, images_a_class=3)
    (root / "c0" / "notes.txt").write_text("no image")
    (root / "stray.jpg").write_bytes(b"in no class")
    entries = list(FolderSource(root=str(root)).entries())
    assert [(entry.name, entry.label_name) for entry in entries] == [
        ("c0/img 0.JPEG", "c0"),
        ("c0/img 1.png", "c0"),
        ("c0/img 2.webp", "c0"),
        ("c1/img 0.JPEG", "c1"),
        ("c1/img 1.png", "c1"),
        ("c1/img 2.webp", "c1"),
    ]


def test_images_are_read_again_by_locator(tmp_path: Path) -> None:
    source = FolderSource(root=str(class_folders(tmp_path, num_classes=1, images_a_class=2)))
    locators = [entry.locator for entry in source.entries()]
    assert list(source.reader().read_many(locators)) == [(tmp_path / locator).read_bytes() for locator in locators]


def test_odd_names_are_normal_input(tmp_path: Path) -> None:
    (tmp_path / "猫").mkdir()
    for name in (b"a.b.c.jpg", b"caf\xe9.jpg", "ü ü.JPG".encode()):
        Path(os.fsdecode(os.fsencode(tmp_path / "猫") + b"/" + name)).write_bytes(image_bytes(1))
    source = FolderSource(root=str(tmp_path))
    entries = list(source.entries())
    assert {entry.name for entry in entries} == {"猫/a.b.c.jpg", "猫/caf\\xe9.jpg", "猫/ü ü.JPG"}
    assert all(isinstance(image, bytes) for image in source.reader().read_many([e.locator for e in entries]))


@pytest.mark.parametrize(
    ("name", "pattern", "label"),
    [
        ("n01440764_tench.JPEG", None, "n01440764"),
        ("plain.jpg", None, None),
        ("17-cat.png", r"\d+-(\w+)\.", "cat"),
    ],
)
def test_flat_labels_come_from_the_name(tmp_path: Path, name: str, pattern: str | None, label: str | None) -> None:
    (tmp_path / name).write_bytes(b"")
    source = FlatSource(root=str(tmp_path))
    if pattern is not None:
        source = FlatSource(root=str(tmp_path), label_pattern=pattern)
    (entry,) = source.entries()
    assert (entry.name, entry.label_name) == (name, label)


@pytest.mark.parametrize("pattern", ["(", "no group", "(two)(groups)"])
def test_patterns_without_exactly_one_group_are_refused(pattern: str) -> None:
    with pytest.raises(UserError, match="label-pattern"):
        FlatSource(root="x", label_pattern=pattern)


@pytest.mark.parametrize("source", [FolderSource(), FlatSource(), FolderSource(root="/no/such/folder")])
def test_a_missing_root_is_the_users_mistake(source: FolderSource | FlatSource) -> None:
    with pytest.raises(UserError, match=r"--source\.root"):
        list(source.entries())


def test_real_photographs_have_their_synset_as_label(test_data: Path) -> None:
    entries = list(FlatSource(root=str(test_data / "imagenet-sample")).entries())
    assert len(entries) == 500
    assert len({entry.label_name for entry in entries}) == 500
    assert entries[0].label_name == "n01440764"
