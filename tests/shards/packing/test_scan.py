"""The scan of a source: its files, its reasons to refuse images, and the copies that it leaves in the work folder."""

import hashlib
import zlib
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shards.images.config import ImageChecks, ImageLimits, Resize
from shards.packing.config import Dedup
from shards.packing.listing import listed
from shards.packing.scan import ScanTask, StagedFile, StagedReader, is_scanned, scan_footer, scan_path, scan_slice
from shards.sources.entry import Entry
from shards.sources.kinds import FlatSource, FolderSource
from shards.sources.parquets import ParquetSource
from shards.store import open_store
from tests.rigs.images import class_folders, half_missing, image_bytes, noisy_jpeg
from tests.rigs.packing import pack_spec, scanned
from tests.rigs.tables import read_table


def test_every_entry_is_listed_with_facts_or_a_reason(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    files = {
        "cat_1.jpg": image_bytes(1, height=20, width=28),
        "cat_2.jpg": b"",
        "dog_3.png": b"<html>not found</html>",
        "dog_5.jpg": image_bytes(3)[:-40],
        "large_6.jpg": image_bytes(4, height=200, width=400),
        "nolabel.jpg": image_bytes(2),
    }
    for name, data in files.items():
        (tmp_path / "images" / name).write_bytes(data)
    (tmp_path / "images" / "dog_4.webp").symlink_to("nowhere")
    spec = pack_spec(FlatSource(root=str(tmp_path / "images")), limits=ImageLimits(max_pixels=50_000))
    store = open_store(str(tmp_path / "out"))
    scanned(store, spec)
    rows = {row["source"]: row for row in read_table(store.read(scan_path(0))).to_pylist()}
    good = rows["cat_1.jpg"]
    data = files["cat_1.jpg"]
    assert (good["height"], good["width"], good["size"], good["ext"], good["mode"]) == (20, 28, len(data), "jpg", "RGB")
    assert (good["crc32"], good["sha256"]) == (zlib.crc32(data), hashlib.sha256(data).digest())
    assert (good["labels"], good["phash"], good["orientation"]) == (["cat"], None, 1)
    reasons = {name: row["reason"] for name, row in rows.items()}
    assert reasons["cat_1.jpg"] is reasons["nolabel.jpg"] is None  # the plan reports unknown labels
    assert reasons["cat_2.jpg"] == "empty file"
    assert "unreadable: No such file" in reasons["dog_4.webp"]
    assert "not a" in reasons["dog_3.png"]
    assert "truncated" in reasons["dog_5.jpg"]
    assert "200x400" in reasons["large_6.jpg"]


def test_a_scan_is_kept_for_the_same_listing_and_settings_only(tmp_path: Path) -> None:
    root = class_folders(tmp_path / "images", num_classes=1, images_a_class=2)
    spec, store = pack_spec(FolderSource(root=str(root))), open_store(str(tmp_path / "out"))
    listing = scanned(store, spec)
    file, sha256 = Path(store.url, scan_path(0)), listing.slices[0].sha256
    before = file.stat().st_mtime_ns
    task = ScanTask(url=store.url, spec=spec, number=0, slice_sha256=sha256)
    assert scan_slice(task) == 0
    assert file.stat().st_mtime_ns == before
    other = pack_spec(spec.source, limits=ImageLimits(max_pixels=10))
    assert not is_scanned(store, 0, scan_footer(other.scan_hash(), sha256))
    (root / "c0" / "new.jpg").write_bytes(image_bytes(9))
    changed = listed(store, spec.source, scan_hash=spec.scan_hash(), relist=True)
    assert not is_scanned(store, 0, scan_footer(spec.scan_hash(), changed.slices[0].sha256))
    scanned(store, spec)
    assert read_table(store.read(scan_path(0))).num_rows == 3


@pytest.mark.parametrize(
    ("truncated", "resize", "is_refused"),
    [
        ("auto", Resize(), False),
        ("auto", Resize(short_side=200), True),
        ("auto", Resize(convert=True), True),
        ("quarantine", Resize(), True),
        ("keep", Resize(), False),
        ("keep", Resize(short_side=200), False),
    ],
)
def test_jpegs_of_which_a_part_is_missing(
    tmp_path: Path, truncated: Literal["auto", "quarantine", "keep"], resize: Resize, is_refused: bool
) -> None:
    (tmp_path / "images").mkdir()
    for name, data in {"cat_1.jpg": noisy_jpeg(), "cat_2.jpg": half_missing(noisy_jpeg())}.items():
        (tmp_path / "images" / name).write_bytes(data)
    source = FlatSource(root=str(tmp_path / "images"))
    store = open_store(str(tmp_path / "out"))
    scanned(store, pack_spec(source, images=ImageChecks(truncated=truncated), resize=resize))
    reasons = {row["source"]: row["reason"] for row in read_table(store.read(scan_path(0))).to_pylist()}
    assert reasons["cat_1.jpg"] is None
    said = reasons["cat_2.jpg"] or ""
    assert said.startswith("truncated: a part of the JPEG is missing (Corrupt JPEG data: ") == is_refused


def test_perceptual_hashes_are_made_only_where_they_are_asked_for(tmp_path: Path) -> None:
    root = class_folders(tmp_path / "images", num_classes=1, images_a_class=2)
    spec = pack_spec(FolderSource(root=str(root)))
    hashed = pack_spec(spec.source, dedup=Dedup(against=("x",)))
    assert spec.scan_hash() != hashed.scan_hash()
    store = open_store(str(tmp_path / "out"))
    listing = listed(store, spec.source, scan_hash=hashed.scan_hash())
    scan_slice(ScanTask(url=store.url, spec=hashed, number=0, slice_sha256=listing.slices[0].sha256))
    hashes = read_table(store.read(scan_path(0))).column("phash").to_pylist()
    assert [len(item) for item in hashes] == [32, 32]


@pytest.mark.parametrize("rows_at_once", [1, 7, 100])
def test_rows_are_written_in_groups(tmp_path: Path, rows_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shards.packing.scan.ROWS_AT_ONCE", rows_at_once)
    root = class_folders(tmp_path / "images", num_classes=2, images_a_class=8)
    store = open_store(str(tmp_path / "out"))
    scanned(store, pack_spec(FolderSource(root=str(root))))
    assert read_table(store.read(scan_path(0))).num_rows == 16


def test_images_that_cannot_be_read_alone_are_staged(tmp_path: Path) -> None:

    images = [image_bytes(number) for number in range(5)]
    rows = [{"image": {"bytes": data, "path": f"{n}.jpg"}, "label": n % 2} for n, data in enumerate(images)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=2)
    store = open_store(str(tmp_path / "out"))
    scanned(store, pack_spec(ParquetSource(files=(str(tmp_path / "a.parquet"),))))
    assert store.read("work/staged-000000.bin") == b"".join(images)


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
