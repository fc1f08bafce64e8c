"""What 1 to 512 ranks read, launch and exchange, on a machine of two cores: one table, every figure with its aim.

    python -m benchmarks.scale --out benchmarks/results/scale.json       # --only reads, host or plan: a part of it
    python -m benchmarks.scale --table                                   # the tables of docs/scale.md

- reads: bytes that all ranks read in an epoch over the bytes of the dataset's blocks, counted by the store. Each rank's
  reader is the one that training uses; small blocks stand for large ones, since both are read whole.
- host: CPU-seconds of one rank to launch a micro-batch and an update, under a process group of this many ranks that
  exchanges nothing. The model has as many tensors as ViT-H/14, but narrow ones, so that computing takes little time;
  what it takes still counts, so this is more than a GPU's host needs.
- plan: what `patchline plan` predicts for the paper's models on H100s.

The table also has the figures of two benchmarks of their own: `benchmarks.scale_start`, how a rank starts on datasets
of 10,000 and 300,000 shards, and `benchmarks.scale_resume`, how ranks resume from checkpoints of 1 to 512 ranks.
"""

import argparse
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.measure import machine
from benchmarks.scale_resume import aims_of
from jobs.cli import main as patchline
from jobs.resolve import default_job
from pipeline.planning.forecast import Forecast, cost_of, forecast
from pipeline.planning.step_time import (
    LAUNCH_SECONDS,
    UPDATE_SECONDS,
    ZERO3_LAUNCH_SECONDS,
    ZERO3_RANK_SECONDS,
)
from pipeline.training.zero.batch_plan import shared_lanes
from shards.config import ReadConfig
from shards.dataset import Dataset, open_dataset
from shards.order import SampleOrder
from shards.reading.read import StreamReader
from shards.storage.local import LocalStore

GPUS = (1, 8, 64, 128, 256, 512)
MODELS = ("vit_b16_jft", "vit_l16_jft", "vit_h14_jft")
RESULT, RESUME, START = (Path(f"benchmarks/results/{name}.json") for name in ("scale", "scale_resume", "scale_start"))
_READ_BY = ((64, 4), (512, 1))  # lanes and blocks of a window: the default, and the recipes of JFT and ImageNet-21k
_IMAGES, _BLOCK, _EPOCHS = 16_384, 4, 3
_HOST = ((1, 1), (1, 512), (3, 8), (3, 512))  # ZeRO stage, ranks
_STEPS = 12
_MOST_READ = 1.12  # of a dataset, in an epoch


@dataclass(frozen=True, kw_only=True)
class Row:
    """A figure with its aim. `aim`: the most that it may be; None: it is only told."""

    part: str
    figure: str
    value: float
    aim: float | None = None

    @property
    def is_met(self) -> bool:
        """Whether it is at most the aim."""
        return self.aim is None or self.value <= self.aim


@dataclass(frozen=True)
class _CountingStore(LocalStore):
    """A folder that counts the bytes that are read of shards."""

    counted: list[int] = field(default_factory=list)

    def read_range(self, path: str, first: int, end: int, **options: object) -> bytes:
        """As the folder does."""
        self.counted.append(end - first)
        return super().read_range(path, first, end, **options)  # type: ignore[arg-type]


def reads() -> Iterator[Row]:
    """Bytes of an epoch, of the second and third, over those of the dataset."""
    with tempfile.TemporaryDirectory() as folder:
        images, packed = Path(folder) / "images", Path(folder) / "packed"
        _write_images(images)
        options = ["--samples-per-block", str(_BLOCK), "--samples-per-shard", "1024"]
        patchline(["pack", "folder", "--source.root", str(images), "--out", str(packed), *options])
        plain = open_dataset(str(packed))
        whole = sum(_bytes_of_block(plain, number) for number in range(plain.block_sizes.size))
        for lanes, window in _READ_BY:
            for num_ranks in (1, 8, 64, 512):
                store = _CountingStore(str(packed))
                dataset = Dataset(store, plain.manifest, fingerprint=plain.fingerprint)
                order = SampleOrder(dataset.block_sizes, seed=1, lanes=lanes, window_blocks=window)
                share = _bytes_of_epochs(dataset, store, order, num_ranks=num_ranks) / whole
                name = f"{lanes} lanes of {window}, {num_ranks} ranks: bytes read / bytes of the dataset"
                if shared_lanes(lanes, window, num_ranks=num_ranks):
                    yield Row(part="reads", figure=f"{name} (a new run is refused)", value=share)
                else:
                    yield Row(part="reads", figure=name, value=share, aim=_MOST_READ)


def _bytes_of_block(dataset: Dataset, number: int) -> int:
    """From its first image to the end of its last, without the headers at its ends, which nobody reads."""
    rows = dataset.rows_of(int(dataset.blocks.first_sample_id[number]), int(dataset.block_sizes[number]))
    return int(rows.offset[-1] + rows.size[-1] - rows.offset[0])


def _write_images(folder: Path) -> None:
    rng = np.random.default_rng(0)
    for number in range(_IMAGES):
        path = folder / str(number % 8) / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        data = io.BytesIO()
        Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(data, "PNG")
        path.write_bytes(data.getvalue())


def _bytes_of_epochs(dataset: Dataset, store: _CountingStore, order: SampleOrder, *, num_ranks: int) -> float:
    """Bytes per epoch, of all ranks, without the first epoch, whose first batches are read sample by sample."""
    batch = max(order.lanes, num_ranks)
    steps = dataset.num_samples // batch
    total = 0
    for rank in range(num_ranks):
        with closing(StreamReader(ReadConfig(connections=1, hedge_share=0.0))) as stream:
            reader = stream.samples(dataset, order)
            for step in range(_EPOCHS * steps):
                if step == steps:
                    store.counted.clear()
                reader.read(order.positions(step, batch, rank, num_ranks))
        total += sum(store.counted)
        store.counted.clear()
    return total / (_EPOCHS - 1)


def host() -> Iterator[Row]:
    """Milliseconds of one rank's process to launch a micro-batch and an update, and what the plan assumes."""
    for stage, num_ranks in _HOST:
        command = [sys.executable, "-m", "benchmarks.scale", "--one-host", str(stage), str(num_ranks)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
        found = json.loads(done.stdout.splitlines()[-1])
        per_tensor = LAUNCH_SECONDS
        if stage == 3:
            per_tensor = ZERO3_LAUNCH_SECONDS + num_ranks * ZERO3_RANK_SECONDS
        where = f"ZeRO-{stage}, {num_ranks} ranks, {found['tensors']} tensors"
        for name, seconds in (("launch", per_tensor), ("update", UPDATE_SECONDS)):
            planned = 1e3 * seconds * found["tensors"]
            yield Row(part="host", figure=f"{where}: {name}, ms", value=found[name])
            yield Row(part="host", figure=f"{where}: {name} that `plan` assumes, ms", value=planned)


def one_host(stage: int, num_ranks: int) -> dict[str, float]:
    """Medians over steps: milliseconds to launch a micro-batch, and an update."""
    os.environ.update(RANK="0", WORLD_SIZE=str(num_ranks), LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    import torch  # noqa: PLC0415 - only the process that is measured needs it
    from torch import distributed as dist  # noqa: PLC0415
    from torch.nn.functional import cross_entropy  # noqa: PLC0415
    from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC0415

    import pipeline.training.zero.engine as zero  # noqa: PLC0415
    from pipeline.models import ModelConfig, build_model  # noqa: PLC0415
    from pipeline.training.settings.job import EngineConfig, OptimizerConfig  # noqa: PLC0415
    from pipeline.training.zero.batch_plan import plan_batch  # noqa: PLC0415

    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
    world = dist.distributed_c10d._get_default_group()
    zero.second_group = lambda: world  # type: ignore[attr-defined]
    config = ModelConfig(name="vit_h14", image_size=28, num_classes=10, width=32, mlp_width=64, num_heads=2)
    model = build_model(config)
    tensors = len(list(model.parameters()))
    engine = zero.Engine(
        model,
        config=EngineConfig(zero_stage=stage, precision="bf16"),  # type: ignore[arg-type]
        plan=plan_batch(num_ranks, micro_batch=0, num_ranks=num_ranks, lanes=1),
        optimizer=OptimizerConfig(name="adamw"),
        clip_norm=0.0,
    )
    engine.train(True)
    images = torch.zeros(1, config.image_size, config.image_size, 3, dtype=torch.uint8)
    labels = torch.zeros(1, dtype=torch.long)
    launches, updates = [], []
    for _ in range(_STEPS):
        began = time.process_time()
        engine.accumulate(lambda model: cross_entropy(model(images).float(), labels))
        launched = time.process_time()
        engine.update(learning_rate=1e-3)
        launches.append(launched - began)
        updates.append(time.process_time() - launched)
    launch, update = (1e3 * statistics.median(each[2:]) for each in (launches, updates))
    return {"tensors": tensors, "launch": launch, "update": update}


def plan() -> Iterator[Row]:
    """Images per second and MFU of the paper's models on H100s, at its batch."""
    for name in MODELS:
        for num_gpus in GPUS:
            found = planned(name, num_gpus)
            where = f"{name} on {num_gpus} H100"
            yield Row(part="plan", figure=f"{where}: images/s", value=found.images_per_second)
            yield Row(part="plan", figure=f"{where}: MFU, %", value=100 * found.mfu_reached)


def planned(name: str, num_gpus: int) -> Forecast:
    """The forecast of a recipe of JFT, as `patchline plan NAME --gpu h100 --num-gpus N` has it."""
    job = default_job("plan", name)
    cost = cost_of(job.training, num_images=job.num_images, num_classes=job.num_classes, days=job.days)
    return forecast(job.training, cost, gpu="h100", num_gpus=num_gpus, mfu=job.mfu, num_classes=job.num_classes)


def plan_table() -> str:
    """The table of docs/scale.md."""
    lines = ["| GPUs | images per GPU | ViT-B/16 | ViT-L/16 | ViT-H/14 |", "|---|---|---|---|---|"]
    for num_gpus in GPUS:
        each = [planned(name, num_gpus) for name in MODELS]
        cells = [f"{found.images_per_second:,.0f} ({100 * found.mfu_reached:.1f} %)" for found in each]
        lines.append(f"| {num_gpus} | {each[0].fit.plan.rank_batch:,} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def result_table(rows: list[Row]) -> str:
    """All figures with their aims."""
    lines = ["| Part | Figure | Value | Aim | Met |", "|---|---|---|---|---|"]
    for row in rows:
        aim, met = ("", "") if row.aim is None else (f"at most {row.aim:,.3g}", "yes" if row.is_met else "no")
        lines.append(f"| {row.part} | {row.figure} | {row.value:,.4g} | {aim} | {met} |")
    return "\n".join(lines) + "\n"


def start_rows() -> Iterator[Row]:
    """What the start of a rank takes, from the committed result of benchmarks/scale_start.py."""
    found = json.loads(START.read_text())
    for one in found["data"]:
        where = f"{one['shards']:,} shards, {one['images'] / 1e6:,.0f} million images, {one['ranks']} ranks of a host"
        most = max(one["asked"].values())
        yield Row(part="start", figure=f"{where}: requests for one object, at most", value=most, aim=1)
        if one["ranks"] == 1:
            continue
        seconds = one["other_open_cpu_seconds"] + one["other_batch_cpu_seconds"]
        yield Row(part="start", figure=f"{where}: CPU-seconds of each other rank", value=seconds, aim=0.5)
        memory = one["other_private_mebibytes"] * 1.048576
        yield Row(part="start", figure=f"{where}: MB of each other rank", value=memory, aim=150)
    for rank, one in found["rank"].items():
        yield Row(part="start", figure=f"modules of rank {rank}", value=one["num_modules"])
        yield Row(part="start", figure=f"CPU-seconds of rank {rank}, imports included", value=one["cpu_seconds"])


def resume_rows() -> Iterator[Row]:
    """What a resume takes, from the committed result of benchmarks/scale_resume.py."""
    for aim in aims_of(json.loads(RESUME.read_text())):
        yield Row(part="resume", figure=aim.what, value=aim.found[0], aim=aim.limit)


def all_rows() -> list[Row]:
    """The rows of the table: those that were kept, and those of the other two benchmarks."""
    kept = [Row(**row) for row in json.loads(RESULT.read_text())["rows"]]
    return [*(row for row in kept if row.part != "plan"), *start_rows(), *resume_rows()]


PARTS = {"reads": reads, "host": host, "plan": plan}


def main() -> None:
    """Measures the parts; prints and keeps the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--out", type=Path, help="file to keep the rows in; those of other parts stay")
    parser.add_argument("--table", action="store_true", help="print the tables of docs/scale.md and measure nothing")
    parser.add_argument("--one-host", nargs=2, type=int, metavar=("STAGE", "RANKS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one_host:
        sys.stdout.write(json.dumps(one_host(*arguments.one_host)) + "\n")
        sys.stdout.flush()
        os._exit(0)  # a group that exchanges nothing cannot be left
    if arguments.table:
        sys.stdout.write(f"{plan_table()}\n{result_table(all_rows())}")
        return
    rows = []
    for part in arguments.only:
        for row in PARTS[part]():
            rows.append(row)
            sys.stdout.write(result_table([row]).splitlines()[-1] + "\n")
            sys.stdout.flush()
    if arguments.out:
        if arguments.out.exists():
            before = [Row(**row) for row in json.loads(arguments.out.read_text())["rows"]]
            rows = [row for row in before if row.part not in arguments.only] + rows
        rows.sort(key=lambda row: list(PARTS).index(row.part))
        found = {"command": "python -m benchmarks.scale", "machine": machine(), "rows": [asdict(row) for row in rows]}
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
