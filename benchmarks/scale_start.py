"""What the start of a rank costs: modules, CPU-seconds, memory, file look-ups, and a dataset of up to 300,000 shards.

The dataset has a real manifest, block table and labels, but no shards: opening it and planning its order reads no more.
Its ranks are processes of one host that open it at the same time and wait for each other, so that proportional memory
is that of all of them. Look-ups are counted by strace. Command:

    python -m benchmarks.scale_start --shards 10000 300000 --ranks 1 8 --out benchmarks/results/scale_start.json
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.measure import machine
from pipeline.data.config import DataConfig, Share
from pipeline.data.stream import plan_stream
from shards.host_copy import LocalRanks
from shards.index import BLOCKS_SCHEMA, LABELS_SCHEMA
from shards.manifest import (
    BLOCKS_PATH,
    FORMAT_VERSION,
    LABELS_PATH,
    Manifest,
    ShardRecord,
    index_path,
    sha256_hex,
    shard_path,
)
from shards.manifest_table import write_manifest
from shards.storage.local import LocalStore
from shards.store import open_store
from shards.tables import table_bytes

NUM_CLASSES, SAMPLES_A_SHARD, SAMPLES_A_BLOCK = 18_291, 1010, 64
LANES, GLOBAL_BATCH, NUM_RANKS = 512, 4096, 512
_MEBIBYTE = 1 << 20


@dataclass(frozen=True, kw_only=True)
class DataStart:
    """What a rank took to open the data of a run and to plan its order, and then to compute its first batch; memory is
    what it has more than before, `private` without what it shares with others. `asked`: the objects it asked for."""

    open_cpu_seconds: float
    batch_cpu_seconds: float
    rss_mebibytes: float
    private_mebibytes: float
    peak_mebibytes: float
    asked: dict[str, int]
    asked_bytes: int


@dataclass(frozen=True, kw_only=True)
class RankStart:
    """A rank in a process of its own up to the point where it would meet the others."""

    num_modules: int
    cpu_seconds: float
    rss_mebibytes: float
    num_lookups: int | None


def main() -> None:
    """Measures each size; prints and keeps the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, nargs="+", default=[10_000, 300_000])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--dataset", help="a small dataset, such as packed digits, for the start of a rank")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--scratch", type=Path, help="folder for the synthetic manifests (65 MB for 300,000 shards)")
    arguments = parser.parse_args()
    words = f"--shards {' '.join(map(str, arguments.shards))} --ranks {' '.join(map(str, arguments.ranks))}"
    command = f"python -m benchmarks.scale_start {words}" + (" --dataset data/digits" if arguments.dataset else "")
    result: dict[str, Any] = {"command": command, "machine": machine(), "data": []}
    if arguments.dataset:
        result["rank"] = {str(rank): asdict(rank_start(arguments.dataset, rank=rank)) for rank in (0, 1)}
        sys.stdout.write(f"{json.dumps(result['rank'])}\n")
    for num_shards in arguments.shards:
        with tempfile.TemporaryDirectory(dir=arguments.scratch) as folder:
            write_synthetic(folder, num_shards)
            for num_ranks in arguments.ranks:
                row = {"shards": num_shards, "images": num_shards * SAMPLES_A_SHARD, "ranks": num_ranks}
                row |= summary(data_starts(folder, num_ranks))
                result["data"].append(row)
                sys.stdout.write(f"{json.dumps(row)}\n")
                sys.stdout.flush()
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


def write_synthetic(url: str, num_shards: int) -> None:
    """Writes manifest, block table and labels of a dataset whose shards do not exist."""
    store, rng = open_store(url), np.random.default_rng(0)
    blocks_a_shard = -(-SAMPLES_A_SHARD // SAMPLES_A_BLOCK)
    num_samples = np.full((num_shards, blocks_a_shard), SAMPLES_A_BLOCK)
    num_samples[:, -1] = SAMPLES_A_SHARD - SAMPLES_A_BLOCK * (blocks_a_shard - 1)
    num_bytes = rng.integers(90_000, 130_000, num_samples.shape) * num_samples
    ends = np.cumsum(num_bytes, axis=1)
    first = np.cumsum(num_samples).reshape(num_samples.shape) - num_samples
    shard = np.repeat(np.arange(num_shards, dtype=np.int32), blocks_a_shard)
    columns = [shard, (ends - num_bytes).ravel(), ends.ravel(), first.ravel(), num_samples.ravel()]
    blocks = pa.Table.from_arrays([pa.array(column) for column in columns], schema=BLOCKS_SCHEMA)
    names = [f"class {number}" for number in range(NUM_CLASSES)]
    each = [pa.array(range(NUM_CLASSES), pa.int32()), pa.array(names), pa.array([1] * NUM_CLASSES, pa.int64())]
    files = {}
    for path, table in {BLOCKS_PATH: blocks, LABELS_PATH: pa.Table.from_arrays(each, schema=LABELS_SCHEMA)}.items():
        data = table_bytes(table)
        store.write(path, data)
        files[path] = sha256_hex(data)
    shards = tuple(
        ShardRecord(
            path=shard_path(number),
            first_sample_id=number * SAMPLES_A_SHARD,
            num_samples=SAMPLES_A_SHARD,
            sha256=_sha256(number),
            num_bytes=int(ends[number, -1]) + 1024,
        )
        for number in range(num_shards)
    )
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        plan_hash=_sha256(-1),
        split="train",
        num_samples=num_shards * SAMPLES_A_SHARD,
        num_classes=NUM_CLASSES,
        num_quarantined=0,
        samples_per_block=SAMPLES_A_BLOCK,
        shards=shards,
        files=files | {index_path(number): _sha256(num_shards + number) for number in range(num_shards)},
    )
    write_manifest(store, manifest)


def _sha256(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()


def data_starts(url: str, num_ranks: int) -> list[DataStart]:
    """Each rank's start on one host, in processes that open the data at the same time."""
    command = [sys.executable, "-c", f"from {__spec__.name} import one_data_start as one; one()", url, str(num_ranks)]
    with tempfile.TemporaryDirectory() as folder:
        environ = os.environ | {"TMPDIR": folder}
        ranks = [
            subprocess.Popen([*command, str(rank)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ)
            for rank in range(num_ranks)
        ]
        _lines(ranks)  # all have opened it, and none ends before all are measured
        for rank in ranks:
            assert rank.stdin is not None
            rank.stdin.write(b"\n")
            rank.stdin.flush()
        found = [DataStart(**json.loads(line)) for line in _lines(ranks)]
        for rank in ranks:
            rank.communicate()
        return found


def _lines(ranks: list["subprocess.Popen[bytes]"]) -> list[bytes]:
    """A line of each rank."""
    found = [rank.stdout.readline() if rank.stdout else b"" for rank in ranks]
    if b"" in found:
        raise RuntimeError("a rank has ended; its own message says why")
    return found


def one_data_start() -> None:
    """One of these processes, with the dataset, the number of ranks and its rank in argv."""
    url, num_ranks, rank = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    asked, read = Counter[str](), LocalStore.read

    def counted(store: LocalStore, path: str, **options: Any) -> bytes:
        data = read(store, path, **options)
        asked.update({path: 1, "": len(data)})
        return data

    LocalStore.read = counted  # type: ignore[method-assign,assignment]
    config = DataConfig(url=url, lanes=LANES, window_blocks=1, num_threads=1, memory_limit_bytes=1 << 40)
    share = Share(global_batch=GLOBAL_BATCH, rank=rank, num_ranks=NUM_RANKS)
    before, began = _memory(), time.process_time()
    ranks = LocalRanks(launch="benchmark", num_ranks=num_ranks)
    planned = plan_stream(
        config, seed=0, image_size=224, share=share, num_cores=1, num_local_ranks=num_ranks, ranks=ranks
    )
    _ = planned.data.label_names
    opened = time.process_time()
    planned.orders[0].rank_batch(0, GLOBAL_BATCH, rank, NUM_RANKS)
    ended = time.process_time()
    os.write(1, b"open\n")
    sys.stdin.readline()
    after, num_bytes = _memory(), asked.pop("", 0)
    found = DataStart(
        open_cpu_seconds=round(opened - began, 2),
        batch_cpu_seconds=round(ended - opened, 2),
        rss_mebibytes=round(after["Rss"] - before["Rss"]),
        private_mebibytes=round(after["Private"] - before["Private"]),
        peak_mebibytes=round(_peak() - before["Rss"]),
        asked=dict(asked),
        asked_bytes=num_bytes,
    )
    os.write(1, json.dumps(asdict(found)).encode() + b"\n")
    sys.stdin.read()


def summary(starts: list[DataStart]) -> dict[str, Any]:
    """The figures of a host: the most of the ranks that read a table, and of those that read none, and what all asked
    for."""
    makers = [start for start in starts if start.asked]
    others = [start for start in starts if not start.asked]
    asked = sum((Counter(start.asked) for start in starts), Counter[str]())
    row: dict[str, Any] = {
        "asked": dict(asked),
        "asked_mebibytes": round(sum(s.asked_bytes for s in starts) / _MEBIBYTE),
    }
    for name in ("open_cpu_seconds", "batch_cpu_seconds", "private_mebibytes", "peak_mebibytes"):
        row[f"maker_{name}"] = max(getattr(start, name) for start in makers)
        if others:
            row[f"other_{name}"] = max(getattr(start, name) for start in others)
    return row


def rank_start(url: str, *, rank: int) -> RankStart:
    """One rank of two until it would meet the other."""
    program = (
        "import json, os, sys, time\n"
        "import jobs.train.pretrain\n"
        "from dataclasses import replace\n"
        "from jobs.recipes.pretrain import digits_smoke\n"
        "from pipeline.ranks.world import current_world\n"
        "from pipeline.training.prepare import prepare\n"
        "job = digits_smoke()\n"
        "job = replace(job, data=replace(job.data, url=sys.argv[1]), run_dir=sys.argv[2], device='cpu')\n"
        "prepared = prepare(job, current_world('cpu'))\n"
        "if prepared.world.is_first:\n"
        "    import pipeline.training.reporting.board\n"
        "rss = [line.split()[1] for line in open('/proc/self/status') if line.startswith('VmRSS')]\n"
        "print(json.dumps([len(sys.modules), time.process_time(), int(rss[0]) / 1024]))\n"
    )
    place = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
    environ = os.environ | place | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    with tempfile.TemporaryDirectory() as run_dir:
        command = [sys.executable, "-c", program, url, f"{run_dir}/run"]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
        lookups = None
        if shutil.which("strace"):
            calls = ["strace", "-f", "-c", "-e", "trace=file", "-o", f"{run_dir}/calls", *command]
            subprocess.run(calls, env=environ, capture_output=True, check=True)
            lines = re.findall(r"^\s*[\d.]+\s+[\d.]+\s+\d+\s+(\d+)", Path(f"{run_dir}/calls").read_text(), re.MULTILINE)
            lookups = sum(map(int, lines[:-1]))  # the last line is the sum
    num_modules, cpu_seconds, rss = json.loads(done.stdout)
    return RankStart(
        num_modules=num_modules, cpu_seconds=round(cpu_seconds, 2), rss_mebibytes=round(rss), num_lookups=lookups
    )


def _peak() -> float:
    found = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(found[1]) / 1024 if found else 0.0


def _memory() -> dict[str, float]:
    """MiB that this process has resident, and those that no other has."""
    found: Counter[str] = Counter()
    for name, kibibytes in re.findall(r"^(\w+):\s+(\d+) kB", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE):
        found[name.partition("_")[0]] += int(kibibytes) / 1024  # type: ignore[assignment]
    return dict(found)


if __name__ == "__main__":
    main()
