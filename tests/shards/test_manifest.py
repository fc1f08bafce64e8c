"""The manifest's JSON, and files that are not a manifest."""

from dataclasses import replace

import pytest

from shards.images.config import ImageLimits
from shards.manifest import Manifest, ShardRecord, fingerprint_of, sha256_hex
from shards.manifest_table import manifest_from, table_of

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


def test_limits_are_written_unless_they_are_the_defaults() -> None:
    assert b"limits" not in MANIFEST.to_bytes()
    lifted = replace(MANIFEST, limits=ImageLimits(max_scans=1000))
    assert Manifest.from_bytes(lifted.to_bytes()) == lifted
    assert manifest_from(table_of(lifted)).limits == lifted.limits
    assert fingerprint_of(lifted.to_bytes()) != fingerprint_of(MANIFEST.to_bytes())


def test_a_manifest_without_description_does_not_mention_it() -> None:
    assert b"description" not in MANIFEST.to_bytes()
    assert b"licence" not in MANIFEST.to_bytes()
    described = replace(MANIFEST, description='a\n"b" \u65e5', licence="CC BY 4.0")
    assert Manifest.from_bytes(described.to_bytes()) == described


@pytest.mark.parametrize(
    "text", ["plain", 'a "quoted" \\ one', "ends in a backslash\\", "line\nline", '",\n "plan_hash": "x']
)
def test_the_fingerprint_leaves_out_description_and_licence_alone(text: str) -> None:
    described = replace(MANIFEST, description=text, licence=text)
    assert fingerprint_of(described.to_bytes()) == sha256_hex(MANIFEST.to_bytes())
    assert fingerprint_of(replace(described, split="test").to_bytes()) != sha256_hex(MANIFEST.to_bytes())


def test_nothing_hides_behind_a_description() -> None:
    data = MANIFEST.to_bytes()
    hidden = data.replace(b'\n "num_classes": 10', b'\n "description": "x", "num_classes": 11')
    assert Manifest.from_bytes(hidden).num_classes == 11
    assert fingerprint_of(hidden) != fingerprint_of(data)
