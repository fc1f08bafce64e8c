"""Time and memory of planning a large collection, including the search for near-duplicates of evaluation sets.

Scan files and evaluation hashes are synthetic, since few machines hold 14.2 million images; everything else is what
`patchline pack --phase plan` does. One image in a thousand is an exact duplicate, and one in a thousand a
near-duplicate of an evaluation image. Command:

    python -m benchmarks.planning --images 1000000 4000000 14200000 --out benchmarks/results/planning.json
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from benchmarks.measure import machine, run
from shards.manifest import FORMAT_VERSION, MANIFEST_PATH, Manifest, ShardRecord, sha256_hex
from shards.packing.config import Dedup, PackSpec
from shards.packing.evaluation_sets import VIEWS, EvaluationSet, hash_tasks, write_hashes
from shards.packing.listing import LISTING_PATH
from shards.packing.scan import SCAN_SCHEMA, scan_footer, scan_path
from shards.sources.kinds import FolderSource
from shards.store import open_store

ROWS_A_FILE = 32_768
NUM_CLASSES = 21_841
IMAGES_A_SHARD = 50_000
ONE_IN = 1000


def main() -> None:
    """Measures each size; prints and keeps the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, nargs="+", default=[1_000_000, 4_000_000, 14_200_000])
    parser.add_argument("--evaluation", type=int, default=200_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--scratch", type=Path, help="folder for the synthetic scans (about 200 bytes per image)")
    arguments = parser.parse_args()
    rows = [_measured(count, arguments) for count in arguments.images]
    command = f"python -m benchmarks.planning --images {' '.join(map(str, arguments.images))}"
    result = {"command": command, "machine": machine(), "rows": rows}
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


def _measured(num_images: int, arguments: argparse.Namespace) -> dict[str, object]:
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as folder:
        command = _synthesise(Path(folder), num_images, arguments.evaluation, workers=arguments.workers)
        measured = run(command)
        plan = json.loads((Path(folder) / "out" / "plan" / "plan.json").read_text())
    row = {
        "images": num_images,
        "evaluation_images": arguments.evaluation,
        "workers": arguments.workers,
        **asdict(measured),
        **{name: plan[name] for name in ("num_samples", "num_duplicates", "num_evaluation", "num_shards")},
    }
    minutes, memory = measured.wall_seconds / 60, measured.peak_bytes / 1e9
    sys.stdout.write(
        f"{num_images:>12,} images: {minutes:.1f} min, {measured.cpu_seconds:.0f} CPU-s, {memory:.2f} GB\n"
    )
    sys.stdout.flush()
    return row


def _synthesise(folder: Path, num_images: int, num_evaluation: int, *, workers: int) -> list[str]:
    """Writes scan files and evaluation hashes; returns the command that plans them."""
    rng = np.random.default_rng(1)
    evaluation = rng.integers(0, 256, (num_evaluation, 32), dtype=np.uint8)
    sets = _write_evaluation(folder, evaluation)
    spec = PackSpec(
        source=FolderSource(root=str(folder / "images")),
        split="train",
        samples_per_shard=1000,
        samples_per_block=64,
        seed=0,
        dedup=Dedup(against=(sets.url,)),
    )
    store = open_store(str(folder / "out"))
    slices = []
    for number, begin in enumerate(range(0, num_images, ROWS_A_FILE)):
        count = min(ROWS_A_FILE, num_images - begin)
        sha256 = f"{number:064x}"
        table = _scan_table(begin, count, evaluation, rng).replace_schema_metadata(
            scan_footer(spec.scan_hash(), sha256)
        )
        with store.create(scan_path(number)) as file:
            pq.write_table(table, file, compression="zstd")
        slices.append({"sha256": sha256, "num_images": count, "num_bytes": 110_000 * count})
    store.write(LISTING_PATH, json.dumps({"scan_hash": spec.scan_hash(), "slices": slices}).encode())
    tasks = hash_tasks(store.url, [sets])
    for task, hashes in zip(tasks, _evaluation_tables(evaluation), strict=True):
        write_hashes(store, task, hashes)
    options = ["--source.root", str(folder / "images"), "--out", store.url, "--dedup.against", sets.url]
    return [sys.executable, "-m", "jobs.cli", "pack", "folder", *options, "--phase", "plan", "--workers", str(workers)]


def _scan_table(begin: int, count: int, evaluation: NDArray[np.uint8], rng: np.random.Generator) -> pa.Table:
    position = np.arange(begin, begin + count)
    label = rng.integers(0, NUM_CLASSES, count)
    sha256 = rng.integers(0, 256, (count, 32), dtype=np.uint8)
    copies = np.flatnonzero(position % ONE_IN == 1)
    sha256[copies] = sha256[copies - 1]
    phash = rng.integers(0, 256, (count, 32), dtype=np.uint8)
    near = np.flatnonzero(position % ONE_IN == 2)
    phash[near] = evaluation[rng.integers(0, len(evaluation), len(near))]
    phash[near, 0] ^= 0b101  # two bits apart
    names = [
        f"n{some:08d}/n{some:08d}_{place}.JPEG" for some, place in zip(label.tolist(), position.tolist(), strict=True)
    ]
    labels = pa.ListArray.from_arrays(np.arange(count + 1), [f"n{some:08d}" for some in label.tolist()])
    columns = {
        "locator": pa.array([name.encode() for name in names]),
        "source": pa.array(names),
        "labels": labels,
        "weights": pa.ListArray.from_arrays(np.zeros(count + 1, np.int32), pa.array([], pa.float32())),
        "ext": pa.repeat("jpg", count),
        "height": pa.array(rng.integers(200, 600, count), pa.int32()),
        "width": pa.array(rng.integers(200, 600, count), pa.int32()),
        "mode": pa.repeat("RGB", count),
        "orientation": pa.array(np.ones(count), pa.int8()),
        "size": pa.array(rng.integers(20_000, 200_000, count), pa.int64()),
        "crc32": pa.array(rng.integers(0, 2**32, count), pa.uint32()),
        "sha256": _binary(sha256),
        "phash": _binary(phash),
        "reason": pa.nulls(count, pa.string()),
    }
    return pa.table(columns, schema=SCAN_SCHEMA)


def _binary(rows: NDArray[np.uint8]) -> pa.Array:
    return pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(rows.shape[1]), len(rows), [None, pa.py_buffer(rows.tobytes())]
    )


def _write_evaluation(folder: Path, evaluation: NDArray[np.uint8]) -> EvaluationSet:
    """Writes the manifest of the evaluation set, whose images are never read."""
    shards = tuple(
        ShardRecord(
            path=f"shards/shard-{begin // IMAGES_A_SHARD:06d}.tar",
            first_sample_id=begin,
            num_samples=min(IMAGES_A_SHARD, len(evaluation) - begin),
            sha256="",
            num_bytes=0,
        )
        for begin in range(0, len(evaluation), IMAGES_A_SHARD)
    )
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        plan_hash="",
        split="test",
        num_samples=len(evaluation),
        num_classes=1,
        num_quarantined=0,
        samples_per_block=64,
        shards=shards,
        files={},
    )
    store = open_store(str(folder / "evaluation"))
    store.write(MANIFEST_PATH, manifest.to_bytes())
    return EvaluationSet(url=store.url, fingerprint=sha256_hex(manifest.to_bytes()), num_shards=len(shards))


def _evaluation_tables(evaluation: NDArray[np.uint8]) -> Iterator[pa.Table]:
    rng = np.random.default_rng(2)
    for begin in range(0, len(evaluation), IMAGES_A_SHARD):
        straight = evaluation[begin : begin + IMAGES_A_SHARD]
        count = len(straight)
        yield pa.table(
            {
                "row": pa.array(np.arange(count), pa.int64()),
                "source": pa.array([f"ILSVRC2012_val_{begin + place:08d}.JPEG" for place in range(count)]),
                "sha256": _binary(rng.integers(0, 256, (count, 32), dtype=np.uint8)),
                "straight": _binary(straight),
                **{view: _binary(rng.integers(0, 256, (count, 32), dtype=np.uint8)) for view in VIEWS[1:]},
            }
        )


if __name__ == "__main__":
    main()
