"""Copies of images in the work folder are read by locator, whole or not at all."""

from pathlib import Path

import pytest

from shards.packing.scan import StagedFile, StagedReader
from shards.sources.entry import Entry
from shards.store import open_store


def test_images_come_back_in_any_order_folder_and_s3(tmp_path: Path, s3_bucket: str) -> None:
    images = [bytes([number]) * (number * 100) for number in range(20)]
    for url in (str(tmp_path), f"s3://{s3_bucket}/x"):
        store = open_store(url)
        locators = []
        for number in (0, 1):
            with StagedFile(store, number) as file:
                some = images[number * 10 : number * 10 + 10]
                locators += [file.add(Entry(locator="", name="n"), image).locator for image in some]
        order = [7, 19, 0, 12, 7]
        assert list(StagedReader(store=store).read_many([locators[n] for n in order])) == [images[n] for n in order]


def test_a_copy_that_is_gone_is_an_unreadable_image(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    with StagedFile(store, 0) as file:
        locator = file.add(Entry(locator="", name="n"), b"12345").locator
    [beyond] = StagedReader(store=store).read_many(["0:3:5"])
    assert isinstance(beyond, OSError)
    store.delete("work/staged-000000.bin")
    [gone] = StagedReader(store=store).read_many([locator])
    assert isinstance(gone, OSError)
    assert "work folder" in str(gone)


def test_nothing_is_left_where_the_scan_fails(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))

    def fail() -> None:
        with StagedFile(store, 0) as file:
            file.add(Entry(locator="", name="n"), b"12345")
            raise RuntimeError("scan failed")

    with pytest.raises(RuntimeError):
        fail()
    assert list(store.list()) == []
