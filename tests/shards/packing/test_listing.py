"""The listing is cut by number and size, frozen, and the same for every task."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from shards.errors import UserError
from shards.packing.listing import LISTING_PATH, Listing, Slice, listed, slice_entries
from shards.sources.digits import DigitsSource
from shards.sources.entry import Entry
from shards.sources.kinds import FolderSource, Source
from shards.store import open_store
from tests.rigs.images import class_folders, image_bytes


@dataclass(frozen=True, kw_only=True)
class Containers(DigitsSource):
    """Four containers of 3 GB each, as a source of archives lists them."""

    def entries(self) -> Iterator[Entry]:
        for name in "abcd":
            yield Entry(locator=name, name=name, num_bytes=3_000_000_000, num_images=0)


def test_slices_are_cut_by_images(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("shards.packing.listing.SLICE_ENTRIES", 600)
    monkeypatch.setattr("shards.packing.listing.FIRST_ENTRIES", 600)
    store = open_store(str(tmp_path))
    listing = listed(store, DigitsSource(), scan_hash="x")
    assert [some.num_images for some in listing.slices] == [600, 600, 238]
    assert listing.amounts() == ([600, 600, 238], "images")
    entries = slice_entries(store, 2, sha256=listing.slices[2].sha256)
    assert [entry.name for entry in entries] == [entry.name for entry in DigitsSource().entries()][1200:]


def test_slices_are_cut_by_bytes_where_containers_are_listed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("shards.packing.listing.FIRST_BYTES", 4 << 30)
    listing = listed(open_store(str(tmp_path)), Containers(), scan_hash="x")
    assert [some.num_bytes for some in listing.slices] == [6_000_000_000, 6_000_000_000]
    assert listing.amounts() == ([6000, 6000], "MB")


def test_the_first_slices_are_smaller(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("shards.packing.listing.SLICE_ENTRIES", 200)
    monkeypatch.setattr("shards.packing.listing.FIRST_ENTRIES", 50)
    listing = listed(open_store(str(tmp_path)), DigitsSource(), scan_hash="x")
    assert [some.num_images for some in listing.slices] == [50] * 4 + [100] * 4 + [200] * 4 + [38]


def test_every_field_of_an_entry_comes_back(tmp_path: Path) -> None:
    entry = Entry(
        locator="a\udcffb.jpg", name="a\\xffb.jpg", labels=("x", "y"), weights=(0.5, 0.25), num_bytes=7, num_images=1
    )

    @dataclass(frozen=True, kw_only=True)
    class One(DigitsSource):
        def entries(self) -> Iterator[Entry]:
            yield entry

    store = open_store(str(tmp_path))
    listing = listed(store, One(), scan_hash="x")
    assert slice_entries(store, 0, sha256=listing.slices[0].sha256) == [entry]


def test_a_listing_is_kept_until_settings_change_or_it_is_asked_anew(tmp_path: Path) -> None:
    root = class_folders(tmp_path / "images", num_classes=1, images_a_class=2)
    source: Source = FolderSource(root=str(root))
    store = open_store(str(tmp_path / "out"))
    first = listed(store, source, scan_hash="x")
    (root / "c0" / "late.jpg").write_bytes(image_bytes(7))
    assert listed(store, source, scan_hash="x") == first
    assert listed(store, source, scan_hash="y").slices[0].num_images == 3
    store.write(LISTING_PATH, b"{}")
    assert listed(store, source, scan_hash="x", relist=True).slices[0].num_images == 3


def test_a_slice_that_is_not_the_listings_is_refused(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    listing = listed(store, DigitsSource(), scan_hash="x")
    with pytest.raises(UserError, match=r"listing-000000\.parquet does not match .*: the source changed"):
        slice_entries(store, 0, sha256="0" * 64)
    with pytest.raises(UserError, match=r"listing-000001\.parquet does not match"):
        slice_entries(store, 1, sha256=listing.slices[0].sha256)
    with pytest.raises(UserError, match=r"listing-000099\.parquet is gone: another command has packed"):
        slice_entries(store, 99, sha256=listing.slices[0].sha256)


def test_an_unreadable_listing_is_made_again(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    for damaged in (b"{", b"[]", b'{"scan_hash": "x"}', b'{"scan_hash": "x", "slices": [{}]}'):
        store.write(LISTING_PATH, damaged)
        assert isinstance(listed(store, DigitsSource(), scan_hash="x"), Listing)


def test_amounts_need_every_slice_to_know_its_images() -> None:
    slices = tuple(Slice(sha256="", num_images=count, num_bytes=2_500_000) for count in (3, 0))
    assert Listing(scan_hash="", slices=slices).amounts() == ([2, 2], "MB")
