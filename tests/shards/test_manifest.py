"""The manifest's JSON, and what is no manifest."""

from dataclasses import replace

import pytest

from shards.manifest import Manifest, ShardRecord

MANIFEST = Manifest(
    format_version=2,
    plan_hash="ab" * 32,
    split="train",
    num_samples=3,
    num_classes=10,
    num_quarantined=1,
    samples_per_block=2,
    shards=(
        ShardRecord(path="shards/a.tar", first_sample_id=0, num_samples=2, sha256="cd" * 32, num_bytes=99),
        ShardRecord(path="shards/b.tar", first_sample_id=2, num_samples=1, sha256="ef" * 32, num_bytes=98),
    ),
    files={"blocks.parquet": "01" * 32},
)


def test_it_comes_back_and_equal_manifests_are_equal_bytes() -> None:
    again = Manifest.from_bytes(MANIFEST.to_bytes())
    assert again == MANIFEST
    assert again.to_bytes() == MANIFEST.to_bytes()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "Expecting value"),
        (b"[]", "not a manifest"),
        (b"{}", "format version None"),
        (b'{"format_version": 99}', "format version 99, this version reads 2"),
        (b'{"format_version": 2}', "not a manifest"),
        (MANIFEST.to_bytes().replace(b'"num_samples": 3', b'"num_samples": 4'), "another number"),
    ],
)
def test_anything_else_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Manifest.from_bytes(data)


def test_counts_must_fit() -> None:
    with pytest.raises(ValueError, match="num_samples is 5"):
        replace(MANIFEST, num_samples=5)
