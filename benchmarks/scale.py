"""What 1 to 512 ranks read, launch and exchange, on a machine of two cores: one table, every figure with its aim.

    python -m benchmarks.scale --out benchmarks/results/scale.json       # --only reads or plan: a part of it
    python -m benchmarks.scale --table                                   # the tables of docs/scale.md
    python -m benchmarks.scale --update      # puts the times of benchmarks.engine and the rates of benchmarks/results/
                                             # gpu_h200.json into `plan`, and the tables there

- reads: bytes that all ranks read in an epoch over the bytes of the dataset's blocks, counted by the store. Each rank's
  reader is the one that training uses; small blocks stand for large ones, since both are read whole.
- plan: what `patchline plan` predicts for the paper's models on H200s.

The table also has the figures of three benchmarks of their own: `benchmarks.engine`, what a step costs the host, from
which the times that `plan` assumes are derived here; `benchmarks.scale_start`, how a rank starts on datasets of 10,000
and 300,000 shards; and `benchmarks.scale_resume`, how ranks resume from checkpoints of 1 to 512 ranks.
"""

import argparse
import io
import json
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.measure import machine
from benchmarks.scale_resume import aims_of
from jobs.cli import main as patchline
from jobs.planning.scaling import forecast_of, gpus_before_host, node_rows
from jobs.resolve import default_job
from pipeline.models.build import shapes_of
from pipeline.models.config import ModelConfig
from pipeline.planning import rates, step_time
from pipeline.planning.cluster_plan import NodesPlan
from pipeline.planning.forecast import Forecast, cost_of
from pipeline.training.fitting.memory import layout_in_engine
from pipeline.training.settings.job import OptimizerConfig
from pipeline.training.zero.batch_plan import shared_lanes
from shards.config import ReadConfig
from shards.dataset import Dataset, open_dataset
from shards.order import SampleOrder
from shards.reading.read import StreamReader
from shards.storage.local import LocalStore

GPUS = (1, 8, 64, 128, 256, 512)
MODELS = ("vit_b16_jft", "vit_l16_jft", "vit_h14_jft")
RESULT, ENGINE, RESUME, START = (
    Path(f"benchmarks/results/{name}.json") for name in ("scale", "engine", "scale_resume", "scale_start")
)
PAGE, STEP_TIME = Path("docs/scale.md"), Path("pipeline/planning/step_time.py")
H200, RATES = Path("benchmarks/results/gpu_h200.json"), Path("pipeline/planning/measured/h200.json")
_GPU = "h200"  # the one that was measured
_EAGER = "ZeRO-1 vit_b16"  # a part of gpu_h200.json, in which the GPU waited for its host
_READ_BY = ((64, 4), (512, 1))  # lanes and blocks of a window: the default, and the recipes of JFT and ImageNet-21k
_IMAGES, _BLOCK, _EPOCHS = 16_384, 4, 3
_MFU = 0.56  # of a step that is faster than today's, for which the host and exchanges count more
_NODES = (1, 8, 64)
_MOST_READ = 1.12  # of a dataset, in an epoch
_LEAST_TOLD = 0.95  # of the usual rate


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
        """Reads as the folder does, and counts the bytes."""
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


def plan() -> Iterator[Row]:
    """Images per second and MFU of the paper's models on H200s, at its batch."""
    for name in MODELS:
        for num_gpus in GPUS:
            found = planned(name, num_gpus)
            where = f"{name} on {num_gpus} H200"
            yield Row(part="plan", figure=f"{where}: images/s", value=found.images_per_second)
            yield Row(part="plan", figure=f"{where}: MFU, %", value=100 * found.mfu_reached)


def planned(name: str, num_gpus: int) -> Forecast:
    """The forecast of a recipe of JFT, as `patchline plan NAME --gpu h200 --num-gpus N` has it."""
    job = replace(default_job("plan", name), gpu=_GPU)
    cost = cost_of(job.training, num_images=job.num_images, num_classes=job.num_classes, days=job.days)
    return forecast_of(job, cost, num_gpus=num_gpus)


def plans_of_h14(nodes: tuple[int, ...], *, mfu: float = 0.0) -> list[NodesPlan]:
    """The plans of ViT-H/14, as `patchline plan vit_h14_jft --gpu h200 --nodes N ... --mfu MFU` has them."""
    job = replace(default_job("plan", "vit_h14_jft"), gpu=_GPU, nodes=nodes, mfu=mfu)
    cost = cost_of(job.training, num_images=job.num_images, num_classes=job.num_classes, days=job.days)
    return node_rows(job, cost)


def plan_table() -> str:
    """The first table of docs/scale.md."""
    lines = ["| GPUs | images per GPU | ViT-B/16 | ViT-L/16 | ViT-H/14 |", "|---|---|---|---|---|"]
    half = dict.fromkeys(MODELS, 0)
    for num_gpus in GPUS:
        each = {name: planned(name, num_gpus) for name in MODELS}
        half |= {name: num_gpus for name, found in each.items() if found.step.compute_share >= 0.5}
        cells = [_rate_of(found) for found in each.values()]
        lines.append(f"| {num_gpus} | {each[MODELS[0]].fit.plan.rank_batch:,} | {' | '.join(cells)} |")
    lines.append(
        f"| at least half of a step computes on up to | | {' | '.join(f'{most} GPUs' for most in half.values())} |"
    )
    waits = [gpus_before_host(found) for found in each.values()]
    lines.append(f"| GPUs wait for their hosts on more than | | {' | '.join(waits)} |")
    return "\n".join(lines) + "\n"


def _rate_of(found: Forecast) -> str:
    """The images per second of a forecast and its MFU. If a slow host may cost more than rounds differ by, also the
    least."""
    rate, least = found.images_per_second, found.least_images_per_second
    said = f"; at least {least:,.0f}" if least < _LEAST_TOLD * rate else ""
    return f"{rate:,.0f} ({100 * found.mfu_reached:.1f} %){said}"


def step_table() -> str:
    """The parts of a step of ViT-H/14."""
    lines = [
        "| GPUs | images per GPU | computes, ms | waits for host, ms | exchanges, ms | efficiency | MFU of the step |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in plans_of_h14(tuple(num_gpus // 8 for num_gpus in GPUS[1:]), mfu=_MFU):
        parts = (row.step.compute, row.step.host, row.step.communication)
        cells = [f"{1e3 * seconds:.0f}" for seconds in parts]
        shares = f"{100 * row.step.compute_share:.0f} % | {100 * row.mfu_reached:.0f} %"
        lines.append(f"| {row.num_gpus} | {row.images_per_gpu} | {' | '.join(cells)} | {shares} |")
    return "\n".join(lines) + "\n"


def cluster_rows() -> list[str]:
    """The rows of the table of what a cluster needs that follow from the rate."""
    plans = plans_of_h14(_NODES)
    reads = [
        f"{row.traffic.read_bytes_per_second / 1e9:.2g} GB/s, {row.traffic.reads_per_second:,.0f} requests/s"
        for row in plans
    ]
    parts = [(1e3 * row.step.communication, 1e3 * row.step.seconds) for row in plans[1:]]
    steps = [f"3,200 Gbit/s: {exchange:.0f} ms of each step of {whole:.0f} ms" for exchange, whole in parts]
    return [
        f"| images from the store | {' | '.join(reads)} |",
        f"| network of a node | not used by ranks | {' | '.join(steps)} |",
    ]


def result_table(rows: list[Row]) -> str:
    """All figures with their aims."""
    lines = ["| Part | Figure | Value | Aim | Met |", "|---|---|---|---|---|"]
    for row in rows:
        aim, met = ("", "") if row.aim is None else (f"at most {row.aim:,.3g}", "yes" if row.is_met else "no")
        lines.append(f"| {row.part} | {row.figure} | {row.value:,.4g} | {aim} | {met} |")
    return "\n".join(lines) + "\n"


def host_constants() -> dict[str, float]:
    """The times of step_time.py in seconds, with two digits, from the committed result of benchmarks/engine.py.

    The model's passes take the median over all numbers of ranks; so does what the engine adds to them under ZeRO-1.
    What it adds under ZeRO-3 is a line over the numbers of ranks, without that of one rank, which gathers nothing."""
    took = _host_seconds()
    num_tensors, num_seen = _tensors_of_h14()
    ranks = sorted(num_ranks for arm, _, num_ranks in took if arm == "model")
    model = statistics.median(took["model", 1, num_ranks] for num_ranks in ranks)
    added = {
        stage: [(took["ours", stage, num_ranks] - took["model", 1, num_ranks]) / num_seen for num_ranks in ranks]
        for stage in (1, 3)
    }
    slope, start = statistics.linear_regression(ranks[1:], added[3][1:])
    found = {
        "LAUNCH_SECONDS": model / num_tensors,
        "ENGINE_SECONDS": statistics.median(added[1]),
        "ZERO3_ENGINE_SECONDS": start,
        "ZERO3_RANK_SECONDS": slope,
    }
    return {name: float(f"{max(0.0, seconds):.2g}") for name, seconds in found.items()}


def slowest_host() -> float:
    """How many times as long as DeepSpeed alone takes here an H200's host took for a tensor, with two digits."""
    part = json.loads(H200.read_text())["parts"][_EAGER]
    seconds = part["part"]["batch"] / statistics.median(part["result"]["images_per_second"])
    num_tensors, _ = _tensors_of_h14()
    here = _host_seconds()["deepspeed", 1, 1] / num_tensors
    of_b16 = len(shapes_of(ModelConfig(name=part["part"]["model"], num_classes=1000)))
    return float(f"{seconds / of_b16 / here:.2g}")


def packaged_rates() -> str:
    """What `plan` takes of benchmarks/results/gpu_h200.json, as JSON."""

    def picked(kind: type, value: dict[str, object]) -> dict[str, object]:
        return {each.name: value[each.name] for each in fields(kind) if each.name in value}

    found = json.loads(H200.read_text())
    parts = {
        name: {
            "part": picked(rates.PartMeasured, entry["part"]),
            "result": picked(rates.ResultMeasured, entry["result"]),
        }
        for name, entry in found["parts"].items()
        if entry["part"]["kind"] in rates.KINDS
    }
    about = picked(rates.AboutMeasured, found["about"])
    return json.dumps({"from": str(H200), "about": about, "parts": parts}, indent=1) + "\n"


def host_rows() -> Iterator[Row]:
    """What a step takes of a rank's host, from the same result, and what `plan` assumes for it."""
    num_tensors, num_seen = _tensors_of_h14()
    passes = num_tensors * step_time.LAUNCH_SECONDS
    for (arm, stage, num_ranks), seconds in sorted(_host_seconds().items()):
        if arm != "ours":
            continue
        engine = step_time.ENGINE_SECONDS
        if stage == 3:
            engine = step_time.ZERO3_ENGINE_SECONDS + num_ranks * step_time.ZERO3_RANK_SECONDS
        assumed = 1e3 * (passes + num_seen * engine)
        figure = f"ZeRO-{stage}, {num_ranks} ranks: a step, ms (`plan` assumes {assumed:.0f})"
        yield Row(part="host", figure=figure, value=1e3 * seconds)
    slowest = step_time.SLOWEST_HOST
    yield Row(part="host", figure="a tensor of eager ViT-B/16 on an H200's host / DeepSpeed alone here", value=slowest)
    alone = _host_seconds()["deepspeed", 1, 1] / num_tensors
    yield Row(part="host", figure="DeepSpeed alone, ZeRO-1, 1 ranks: a step, µs for each tensor", value=1e6 * alone)
    for name, seconds in host_constants().items():
        yield Row(part="host", figure=f"`{name}` of `plan`, µs", value=1e6 * seconds)


def _host_seconds() -> dict[tuple[str, int, int], float]:
    """CPU-seconds of a step, by arm, ZeRO stage and number of ranks."""
    figures = json.loads(ENGINE.read_text())["figures"]
    return {(one["arm"], one["stage"], one["ranks"]): one["milliseconds"] / 1e3 for one in figures}


def _tensors_of_h14() -> tuple[int, int]:
    """How many tensors of weights the model of benchmarks/engine.py has, and how many of them DeepSpeed sees."""
    config = ModelConfig(name="vit_h14", num_classes=10)
    return len(shapes_of(config)), len(layout_in_engine(config, OptimizerConfig(weight_decay=0.1)))


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
    """The rows of the table: those that were kept, and those of the other three benchmarks."""
    kept = [Row(**row) for row in json.loads(RESULT.read_text())["rows"]]
    return [*(row for row in kept if row.part != "plan"), *host_rows(), *start_rows(), *resume_rows()]


def tables() -> list[str]:
    """The tables and rows of docs/scale.md."""
    return [plan_table(), step_table(), "\n".join(cluster_rows()) + "\n", result_table(all_rows())]


def update() -> None:
    """Puts the times of `host_constants` into step_time.py, measured rates into the package, and the tables into
    docs/scale.md."""
    source = STEP_TIME.read_text()
    for name, seconds in host_constants().items():
        source = re.sub(rf"^{name} = .*$", f"{name} = {1e6 * seconds:g}e-6", source, flags=re.MULTILINE)
    source = re.sub(r"^SLOWEST_HOST = .*$", f"SLOWEST_HOST = {slowest_host():.1f}", source, flags=re.MULTILINE)
    STEP_TIME.write_text(source)
    RATES.write_text(packaged_rates())
    # Another process prints the tables, because this one has the times from before.
    command = [sys.executable, "-m", "benchmarks.scale", "--table"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    page = PAGE.read_text()
    for table in printed.strip().split("\n\n"):
        first, second = table.splitlines()[:2]
        if second.startswith("|---"):
            page = _with_lines(page, rf"{re.escape(first)}(\n\|.*)+", table)
            continue
        for row in table.splitlines():
            page = _with_lines(page, rf"{re.escape(row[: row.index('|', 1)])}.*", row)
    PAGE.write_text(page)


def _with_lines(page: str, pattern: str, lines: str) -> str:
    """The page with these lines instead of those that match the pattern."""
    found = re.search(rf"^{pattern}$", page, flags=re.MULTILINE)
    if found is None:
        raise RuntimeError(f"{PAGE} has no line that begins with {lines.splitlines()[0]!r}")
    return f"{page[: found.start()]}{lines}{page[found.end() :]}"


PARTS = {"reads": reads, "plan": plan}


def main() -> None:
    """Measures the parts; prints and keeps the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--out", type=Path, help="file to keep the rows in; those of other parts stay")
    parser.add_argument("--table", action="store_true", help="print the tables of docs/scale.md and measure nothing")
    parser.add_argument(
        "--update", action="store_true", help="put the host's times into `plan`, and the tables into docs"
    )
    arguments = parser.parse_args()
    if arguments.update:
        update()
        return
    if arguments.table:
        sys.stdout.write("\n".join(tables()))
        return
    rows = []
    for part in arguments.only:
        for row in PARTS[part]():
            rows.append(row)
            sys.stdout.write(result_table([row]).splitlines()[-1] + "\n")
            sys.stdout.flush()
    if arguments.out:
        where = machine()
        if arguments.out.exists():
            kept = json.loads(arguments.out.read_text())
            before = [Row(**row) for row in kept["rows"]]
            rows = [row for row in before if row.part not in arguments.only] + rows
            where = where if "reads" in arguments.only else kept["machine"]  # plans are computed
        rows.sort(key=lambda row: list(PARTS).index(row.part))
        found = {"command": "python -m benchmarks.scale", "machine": where, "rows": [asdict(row) for row in rows]}
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
