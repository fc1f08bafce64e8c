"""Settings of a packing: bad values are refused, and each setting is in the hash of the scan or the plan."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from shards.dataset import open_dataset
from shards.errors import UserError
from shards.images.config import ImageChecks, ImageLimits, Resize
from shards.packing.config import MOST_CHARACTERS, About, Dedup, PackSpec
from shards.packing.merge import describe
from shards.sources.digits import DigitsSource
from shards.verifying.verify import verify_dataset
from tests.rigs.datasets import file_hashes, packed_folders
from tests.rigs.packing import pack_spec


@pytest.mark.parametrize(
    ("change", "is_same"),
    [
        ({}, True),
        ({"seed": 9, "samples_per_shard": 9}, True),  # the scan does not use them
        ({"resize": Resize(short_side=9), "images": ImageChecks(truncated="keep")}, True),
        ({"resize": Resize(short_side=9)}, False),  # the scan looks for JPEGs of which a part is missing
        ({"images": ImageChecks(truncated="quarantine")}, False),
        ({"dedup": Dedup(duplicates="keep")}, True),
        ({"source": DigitsSource(split="test")}, False),
        ({"limits": ImageLimits(max_pixels=9)}, False),
        ({"dedup": Dedup(against=("a",))}, False),
    ],
)
def test_only_what_the_scan_asks_for_changes_its_hash(change: dict[str, object], is_same: bool) -> None:
    spec = pack_spec(DigitsSource())
    assert (replace(spec, **change).scan_hash() == spec.scan_hash()) == is_same  # type: ignore[arg-type]


def test_versions_name_what_can_change_a_byte() -> None:
    plain, hashed = pack_spec(DigitsSource()), pack_spec(DigitsSource(), dedup=Dedup(against=("a",)))
    assert {"numpy", "pyarrow", "pillow", "scikit-learn"} <= set(plain.versions())
    assert set(hashed.versions()) > set(plain.versions())
    assert isinstance(plain, PackSpec)


@pytest.mark.parametrize(
    "text", ["", "x" * MOST_CHARACTERS, "two\nlines", "日本語 \u200cشمس 👩\u200d🔬", "<script>", "a 'b' \"c\" \\"]
)
def test_any_text_is_allowed(text: str) -> None:
    assert About(description=text, licence=text).description == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x" * (MOST_CHARACTERS + 1), "10,001 characters; allowed: at most 10,000; shorten it"),
        ("a\x1b[31m", r"'\\x1b' as character 2; allowed: printable text and line breaks"),
        ("a\r\n", r"'\\r' as character 2"),
        ("\x00", r"'\\x00' as character 1"),
        ("\x85", r"'\\x85' as character 1"),
        ("ab\udcff", r"'\\udcff' as character 3"),
        ("\u202egpj", r"'\\u202e' as character 1"),
    ],
)
def test_too_long_and_control_characters_are_refused(text: str, message: str) -> None:
    for option in ("description", "licence"):
        with pytest.raises(UserError, match=f"--{option} has {message}"):
            About(**{option: text})


def test_only_the_manifest_changes_and_the_fingerprint_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    out = packed_folders(tmp_path)
    before, hashes = open_dataset(str(out)), file_hashes(out)
    describe(before.store, before.manifest, About(description="Birds.", licence="CC0"))
    after = open_dataset(str(out))
    assert (after.manifest.description, after.manifest.licence) == ("Birds.", "CC0")
    assert after.fingerprint == before.fingerprint
    changed = {name for name, sha256 in file_hashes(out).items() if hashes[name] != sha256}
    assert changed == {"manifest.json"}
    assert verify_dataset(str(out), deep=True) == []
    assert f"description and licence written to {out}/manifest.json" in caplog.text


def test_an_empty_text_leaves_the_one_that_is_there(tmp_path: Path) -> None:
    out = packed_folders(tmp_path)
    first = open_dataset(str(out))
    for about in (About(description="Birds.", licence="CC0"), About(licence="MIT"), About()):
        describe(first.store, open_dataset(str(out)).manifest, about)
    manifest = open_dataset(str(out)).manifest
    assert (manifest.description, manifest.licence) == ("Birds.", "MIT")
