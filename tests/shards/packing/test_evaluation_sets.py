"""Images of evaluation sets are found in a collection, and the closest and most doubtful pairs are shown."""

import hashlib
import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image, ImageOps

from jobs.data.pack import PackJob, run
from shards.errors import UserError
from shards.images.near_duplicates import perceptual_hash
from shards.manifest import MANIFEST_PATH
from shards.packing.config import Dedup
from shards.packing.evaluation_sets import (
    VIEWS,
    EvaluationImages,
    closest_matches,
    find_sets,
    hash_shard,
    hash_tasks,
    load_images,
)
from shards.packing.plan import DROPPED_PATH, MATCHES_PATH
from shards.sources.kinds import FolderSource
from shards.store import Store, open_store
from tests.rigs.datasets import packed_folders
from tests.rigs.packing import pack_spec, planned, scanned
from tests.rigs.tables import read_table


def shapes(seed: int) -> Image.Image:
    """A picture with structure: smooth random colours, 96x128."""
    pixels = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((128, 96), Image.Resampling.BICUBIC)


def jpeg(image: Image.Image, quality: int = 90, *, progressive: bool = False) -> bytes:
    file = io.BytesIO()
    image.save(file, format="JPEG", quality=quality, progressive=progressive)
    return file.getvalue()


@pytest.fixture
def evaluation_url(tmp_path: Path) -> str:
    """Six pictures, packed into shards of 4."""
    folder = tmp_path / "evaluation"
    (folder / "images" / "c").mkdir(parents=True)
    for seed in range(6):
        (folder / "images" / "c" / f"{seed}.jpg").write_bytes(jpeg(shapes(seed)))
    store = open_store(str(folder / "packed"))
    source = FolderSource(root=str(folder / "images"))
    assert run(PackJob(out=store.url, source=source, samples_per_shard=4)) == 0
    return store.url


@pytest.fixture
def images(evaluation_url: str, tmp_path: Path) -> EvaluationImages:
    sets = find_sets((evaluation_url,))
    for task in hash_tasks(str(tmp_path / "out"), sets):
        assert hash_shard(task) == 1
    return load_images(str(tmp_path / "out"), tuple(sets))


def closest(images: EvaluationImages, data: bytes) -> tuple[str, int] | None:
    """The evaluation image that `data` is a copy of, and its distance."""
    phash = perceptual_hash(data)
    rows, distances = images.closest(
        np.frombuffer(hashlib.sha256(data).digest(), np.uint8)[None],
        np.frombuffer(phash or bytes(32), np.uint8)[None],
        np.array([phash is not None]),
        max_distance=64,
    )
    return (images.match(int(rows[0])).source, int(distances[0])) if rows[0] >= 0 else None


def test_the_very_image_is_at_distance_zero(images: EvaluationImages) -> None:
    assert images.num_images == 6
    for seed in range(6):
        assert closest(images, jpeg(shapes(seed))) == (f"c/{seed}.jpg", 0)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("re-encoded", lambda image: jpeg(image, 40)),
        ("half as large", lambda image: jpeg(image.resize((64, 48)))),
        ("mirrored", lambda image: jpeg(ImageOps.mirror(image))),
        ("grey", lambda image: jpeg(image.convert("L"))),
    ],
)
def test_a_changed_copy_is_found(images: EvaluationImages, name: str, change: object) -> None:
    for seed in range(6):
        found = closest(images, change(shapes(seed)))  # type: ignore[operator]
        assert found is not None, (name, seed)
        assert found[0] == f"c/{seed}.jpg"


def test_another_image_is_not_found(images: EvaluationImages) -> None:
    assert [closest(images, jpeg(shapes(seed))) for seed in range(100, 130)] == [None] * 30


def test_copies_are_left_out_listed_and_shown(evaluation_url: str, tmp_path: Path) -> None:
    root = tmp_path / "mine"
    (root / "c").mkdir(parents=True)
    for seed in (50, 51, 52):
        (root / "c" / f"own {seed}.jpg").write_bytes(jpeg(shapes(seed)))
    (root / "c" / "exact.jpg").write_bytes(jpeg(shapes(1)))
    (root / "c" / "exact again.jpg").write_bytes(jpeg(shapes(1)))
    (root / "c" / "mirrored.jpg").write_bytes(jpeg(ImageOps.mirror(shapes(2)), 60))
    store = open_store(str(tmp_path / "out"))
    plan = planned(store, pack_spec(FolderSource(root=str(root)), dedup=Dedup(against=(evaluation_url,))))
    assert (plan.num_samples, plan.num_evaluation, plan.num_duplicates, plan.num_refused) == (3, 3, 0, 0)
    rows = {row["source"]: row for row in read_table(store.read(DROPPED_PATH)).to_pylist()}
    assert (rows["c/exact.jpg"]["match"], rows["c/exact.jpg"]["distance"]) == ("c/1.jpg", 0)
    assert rows["c/exact again.jpg"]["kind"] == "evaluation"
    assert rows["c/mirrored.jpg"]["match"] == "c/2.jpg"
    assert evaluation_url in rows["c/mirrored.jpg"]["reason"]
    matches = read_table(store.read(MATCHES_PATH)).to_pylist()
    assert [row["distance"] for row in matches] == sorted(row["distance"] for row in matches)
    assert all(row["thumbnail"][:2] == row["evaluation_thumbnail"][:2] == b"\xff\xd8" for row in matches)
    assert {row["evaluation_set"] for row in matches} == {evaluation_url}


def test_hashes_are_kept_and_must_be_of_the_same_set(evaluation_url: str, store_with_hashes: Store) -> None:
    [item] = find_sets((evaluation_url,))
    other = replace(item, fingerprint="0" * 64)
    with pytest.raises(UserError, match=r"evaluation-00-000000\.parquet is missing or of another"):
        load_images(store_with_hashes.url, (other,))
    [task, _] = hash_tasks(store_with_hashes.url, [other])
    with pytest.raises(UserError, match="has changed since this command began"):
        hash_shard(task)


@pytest.fixture
def store_with_hashes(evaluation_url: str, tmp_path: Path) -> Store:
    store = open_store(str(tmp_path / "hashed"))
    source = FolderSource(root=str(tmp_path / "evaluation" / "images"))
    scanned(store, pack_spec(source, dedup=Dedup(against=(evaluation_url,))))
    return store


def test_another_dataset_can_be_named_twice(tmp_path: Path) -> None:
    url = str(packed_folders(tmp_path))
    assert [item.num_shards for item in find_sets((url, url))] == [4, 4]


def test_a_collection_of_copies_alone_is_refused_with_the_reason(evaluation_url: str, tmp_path: Path) -> None:
    source = FolderSource(root=str(tmp_path / "evaluation" / "images"))
    spec = pack_spec(source, dedup=Dedup(against=(evaluation_url,)))
    with pytest.raises(UserError, match="no usable image: of 6, 6 are of evaluation sets"):
        planned(open_store(str(tmp_path / "out")), spec)


def test_an_image_beyond_the_limits_of_its_dataset_is_not_decoded(evaluation_url: str, tmp_path: Path) -> None:
    root = Path(evaluation_url).parent / "images"
    (root / "c" / "scans.jpg").write_bytes(jpeg(shapes(6), progressive=True))
    packed = tmp_path / "packed"
    assert run(PackJob(out=str(packed), source=FolderSource(root=str(root)))) == 0
    assert count_hashed(packed, tmp_path / "before") == 7
    manifest = json.loads((packed / MANIFEST_PATH).read_bytes()) | {"limits": {"max_scans": 3}}
    (packed / MANIFEST_PATH).write_text(json.dumps(manifest, sort_keys=True, indent=1) + "\n")
    assert count_hashed(packed, tmp_path / "after") == 6


def count_hashed(url: Path, out: Path) -> int:
    """How many images of an evaluation set have a perceptual hash."""
    [task] = hash_tasks(str(out), find_sets((str(url),)))
    hash_shard(task)
    table = read_table(open_store(str(out)).read("work/evaluation-00-000000.parquet"))
    return sum(found is not None for found in table.column(VIEWS[0]).to_pylist())


@pytest.mark.parametrize(
    ("num_overlaps", "distances"),
    [(0, []), (3, [0, 1, 2]), (100, [*range(24), *range(76, 100)])],
)
def test_the_ends_of_the_range_are_shown(tmp_path: Path, num_overlaps: int, distances: list[int]) -> None:
    url = str(packed_folders(tmp_path))
    rows = range(num_overlaps)
    dropped = pa.table(
        {
            "position": pa.array(rows, pa.int64()),
            "locator": pa.array([b"c0/img 0.JPEG" if row else b"gone.jpg" for row in rows], pa.binary()),
            "source": pa.array([f"own {row}" for row in rows], pa.string()),
        }
    )
    overlaps = pa.table(
        {
            "position": pa.array(rows, pa.int64()),
            "distance": pa.array(rows, pa.int32()),
            "match": pa.array(["c1/x.jpg"] * num_overlaps, pa.string()),
            "set_number": pa.array([0] * num_overlaps, pa.int64()),
            "shard": pa.array([1] * num_overlaps, pa.int64()),
            "row": pa.array([row % 5 for row in rows], pa.int64()),
        }
    )
    spec = pack_spec(FolderSource(root=str(tmp_path / "images")))
    store, sets = open_store(str(tmp_path / "out")), tuple(find_sets((url,)))
    found = closest_matches(store, spec, dropped, overlaps, sets).to_pylist()
    assert [row["distance"] for row in found] == distances
    for row in found:
        is_there = row["source"] != "own 0"
        assert (row["thumbnail"] is not None) == is_there
        # A shard has four samples: the fifth row belongs to an index that has changed since.
        assert (row["evaluation_thumbnail"] is not None) == (row["distance"] % 5 < 4)
        assert (row["evaluation"], row["evaluation_set"]) == ("c1/x.jpg", url)
