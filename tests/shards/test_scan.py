"""The scan: what it finds, what it refuses, and that it is the same however it is shared out."""

from pathlib import Path

import pytest

from shards.index import read_table
from shards.scan import ScanTask, is_scan_of, quarantined, scan_path, scan_slice, slices
from shards.sources import DigitsSource, FlatSource, FolderSource
from shards.store import open_store
from tests.rigs.images import class_folders, image_bytes


def test_slices_cut_by_position(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shards.scan.SLICE_ENTRIES", 600)
    parts = list(slices(DigitsSource()))
    assert [(part.number, part.first_position, len(part.entries)) for part in parts] == [
        (0, 0, 600),
        (1, 600, 600),
        (2, 1200, 238),
    ]


def test_every_entry_is_listed_with_facts_or_a_reason(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    files = {
        "cat_1.jpg": image_bytes(1, height=20, width=28),
        "cat_2.jpg": b"",
        "dog_3.png": b"<html>not found</html>",
        "nolabel.jpg": image_bytes(2),
    }
    for name, data in files.items():
        (tmp_path / "images" / name).write_bytes(data)
    (tmp_path / "images" / "dog_4.webp").symlink_to("nowhere")
    source = FlatSource(root=str(tmp_path / "images"))
    (part,) = slices(source)
    store = open_store(str(tmp_path / "out"))
    assert scan_slice(ScanTask(url=store.url, source=source, slice=part)) == 5
    data = store.read(scan_path(0))
    first = read_table(data).to_pylist()[0]
    assert (first["height"], first["width"], first["size"]) == (20, 28, len(files["cat_1.jpg"]))
    assert {row["source"]: row["reason"] for row in quarantined(data).to_pylist()} == {
        "cat_2.jpg": "empty file",
        "dog_3.png": "not a JPEG, PNG or WebP image",
        "dog_4.webp": "unreadable: No such file or directory",
        "nolabel.jpg": "no label",
    }


def test_a_scan_is_kept_for_the_same_listing_only(tmp_path: Path) -> None:
    root = class_folders(tmp_path / "images", num_classes=1, images_a_class=2)
    source, store = FolderSource(root=str(root)), open_store(str(tmp_path / "out"))
    (part,) = slices(source)
    scan_slice(ScanTask(url=store.url, source=source, slice=part))
    before = Path(store.url, scan_path(0)).stat().st_mtime_ns
    scan_slice(ScanTask(url=store.url, source=source, slice=part))
    assert Path(store.url, scan_path(0)).stat().st_mtime_ns == before
    (root / "c0" / "new.jpg").write_bytes(image_bytes(9))
    (changed,) = slices(source)
    assert is_scan_of(store.read(scan_path(0)), source, part)
    assert not is_scan_of(store.read(scan_path(0)), source, changed)
    scan_slice(ScanTask(url=store.url, source=source, slice=changed))
    assert is_scan_of(store.read(scan_path(0)), source, changed)
