"""Settings that affect bytes: bad values are refused, and each setting is part of the hash of the scan or the plan."""

from dataclasses import replace

import pytest

from shards.errors import UserError
from shards.images.config import ImageChecks, ImageLimits, Resize
from shards.packing.config import Dedup, PackSpec
from shards.sources.digits import DigitsSource
from tests.rigs.packing import pack_spec


@pytest.mark.parametrize("distance", [-1, 128, 256])
def test_impossible_distances_are_refused(distance: int) -> None:
    with pytest.raises(UserError, match=rf"^dedup\.max_distance is {distance}; allowed: 0 to 127$"):
        Dedup(max_distance=distance)


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
