"""What a run is worth, for its report: compute and device-days, its accuracy beside the paper's Table 2, and the
figures of `patchline inspect`, if they are there."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs.record import read_leaves
from jobs.reports.compare_facts import Point, point_of
from jobs.train.sweep import is_repetition, read_sweep, sweep_of
from jobs.train.trials import METRICS
from pipeline.evaluation.config import EvaluationConfig
from pipeline.runs.facts import METRICS as METRICS_FILE
from pipeline.runs.starts import Start, read_starts
from shards.errors import InvalidDataError, UserError
from shards.files.json_lines import is_finite, read_lines
from shards.files.typed_json import parse_json
from shards.local_file import read_local_file
from shards.pages.page import data_uri

_SECONDS_A_DAY = 86_400
_MOST_FIGURE_BYTES, _MOST_SWEEP_BYTES = 8 << 20, 16 << 20
_PNG = b"\x89PNG\r\n\x1a\n"
# Files of `patchline inspect`, with what they show.
_FIGURES = (
    ("filters", "Principal components of the patch embedding's filters"),
    ("positions", "Similarity of position embeddings, as learned and resampled"),
    ("attention_distance", "Mean attention distance of each head"),
    ("shifts", "What stays the same when an image moves"),
    ("rollout", "Attention rollout over images"),
)
COLUMNS = (
    "ViT-H/14, JFT",
    "ViT-L/16, JFT",
    "ViT-L/16, ImageNet-21k",
    "BiT-L (R152x4)",
    "Noisy Student (EfficientNet-L2)",
)
# "An Image is Worth 16x16 Words", Table 2: accuracy in percent and its deviation over three fine-tuning runs.
TABLE_2 = {
    "ImageNet": ("88.55 ± 0.04", "87.76 ± 0.03", "85.30 ± 0.02", "87.54 ± 0.02", "88.4 / 88.5"),
    "ImageNet-ReaL": ("90.72 ± 0.05", "90.54 ± 0.03", "88.62 ± 0.05", "90.54", "90.55"),
    "CIFAR-10": ("99.50 ± 0.06", "99.42 ± 0.03", "99.15 ± 0.03", "99.37 ± 0.06", "–"),
    "CIFAR-100": ("94.55 ± 0.04", "93.90 ± 0.05", "93.25 ± 0.05", "93.51 ± 0.08", "–"),
    "Oxford-IIIT Pets": ("97.56 ± 0.03", "97.32 ± 0.11", "94.67 ± 0.15", "96.62 ± 0.23", "–"),
    "Oxford Flowers-102": ("99.68 ± 0.02", "99.74 ± 0.00", "99.61 ± 0.02", "99.63 ± 0.03", "–"),
    "VTAB (19 tasks)": ("77.63 ± 0.23", "76.28 ± 0.46", "72.72 ± 0.21", "76.29 ± 1.70", "–"),
}
CORE_DAYS = ("2.5k", "0.68k", "0.23k", "9.9k", "12.3k")  # TPUv3-core-days of pre-training
_NAMES = {  # of a dataset's folder, without its split
    **dict.fromkeys(("imagenet", "imagenet1k", "ilsvrc2012"), "ImageNet"),
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    **dict.fromkeys(("pets", "oxfordpets", "oxfordiiitpet", "oxfordiiitpets"), "Oxford-IIIT Pets"),
    **dict.fromkeys(("flowers", "flowers102", "oxfordflowers102"), "Oxford Flowers-102"),
}
_VTAB = {"natural": "natural", "specialized": "specialised", "structured": "structured", "mean": "VTAB (19 tasks)"}
_SPLIT = re.compile(r"[-_.](test|val|validation|valid)$")


@dataclass(frozen=True, kw_only=True)
class Repeats:
    """The same recipe with several seeds: how many, the mean of their scores by the sweep's `metric`, and the deviation
    of a sample."""

    num_runs: int
    mean: float
    deviation: float
    metric: str = "accuracy"


@dataclass(frozen=True, kw_only=True)
class Worth:
    """`device_days`: of all ranks over all starts; `dataset`: that of Table 2 on which the run is scored, or empty, and
    its `accuracy` there; `is_held_out`: the point's accuracy is of a part of the training data instead; `repeats`: of a
    repetition of a sweep, that of all of them; `vtab`: its means over groups of tasks and over all, those of RUN/vtab
    that are whole, with deviations over seeds; `figures`: title and data URI of each.
    `reasons`: why something is not known."""

    point: Point | None
    device_days: float | None
    dataset: str
    accuracy: float | None
    is_held_out: bool
    repeats: Repeats | None
    vtab: tuple[tuple[str, float, float | None], ...]
    figures: tuple[tuple[str, str], ...]
    reasons: tuple[str, ...]


def worth_of(run_dir: Path, *, wall_seconds: float) -> Worth:
    """What the run is worth, from its own files; what cannot be read is a reason."""
    reasons: list[str] = []
    point, url, days = None, "", None
    try:
        point = point_of(run_dir, name=run_dir.resolve().name)
        reasons += point.reasons
        url = read_leaves(run_dir / "job.yaml").get("job.evaluation.url", "")
        days = device_days(read_starts(run_dir), wall_seconds=wall_seconds)
    except (OSError, ValueError, UserError, InvalidDataError) as error:
        reasons.append(f"its cost is not known: {error}")
    is_held_out = bool(point and point.scored_on and point.scored_on.part)
    accuracy = point.accuracy if point else None
    if is_held_out:
        accuracy = _accuracy_on(url, run_dir)
    return Worth(
        point=point,
        device_days=days,
        dataset=_dataset(url) if accuracy is not None else "",
        accuracy=accuracy,
        is_held_out=is_held_out,
        repeats=_repeats(run_dir.resolve()),
        vtab=_vtab(run_dir / "vtab" / "vtab.json"),
        figures=tuple(_figures(run_dir / "inspect")),
        reasons=tuple(reasons),
    )


def _accuracy_on(url: str, run_dir: Path) -> float | None:
    """The last one on --evaluation.url beside a part that is held out; of the averaged weights if there are any."""
    names = EvaluationConfig(url=url).sets(has_held_out=True)
    keys = [f"eval/{name}/{kind}accuracy" for name in names for kind in ("ema_", "")]
    for line in reversed(read_lines(run_dir / METRICS_FILE, is_usable=lambda _: True).objects):
        for key in keys:
            value = line.get(key)
            if is_finite(value) and 0 <= value <= 1:  # type: ignore[operator]
                return float(value)  # type: ignore[arg-type]
    return None


def device_days(starts: Sequence[Start], *, wall_seconds: float) -> float | None:
    """The time of each start until the next, times its ranks; None if no start is on record."""
    if not starts:
        return None
    ends = [*(one.total_seconds for one in starts[1:]), wall_seconds]
    spans = [max(0.0, end - one.total_seconds) * one.num_ranks for one, end in zip(starts, ends, strict=True)]
    return sum(spans) / _SECONDS_A_DAY


def _repeats(run_dir: Path) -> Repeats | None:
    """The mean that the sweep.json of a repetition has."""
    sweep = sweep_of(run_dir)
    found = read_sweep(sweep) if sweep else None
    if found is None or not is_repetition(run_dir, found):
        return None
    numbers: list[Any] = [found.get(name) for name in ("mean", "deviation")]
    mean, deviation = numbers
    metric = str(found.get("score"))
    is_usable = is_finite(mean) and is_finite(deviation) and 0 <= mean <= 1 and 0 <= deviation <= 1
    is_usable = is_usable and metric in METRICS
    return Repeats(num_runs=len(found["seeds"]), mean=mean, deviation=deviation, metric=metric) if is_usable else None


def _vtab(path: Path) -> tuple[tuple[str, float, float | None], ...]:
    """The means that `patchline vtab --run-dir RUN/vtab` has left, and over several seeds their deviations."""
    try:
        found = parse_json(read_local_file(path, most_bytes=_MOST_SWEEP_BYTES))
    except (OSError, ValueError, InvalidDataError):
        return ()
    facts: dict[str, Any] = found if isinstance(found, dict) else {}
    spread: dict[str, Any] = facts["deviations"] if isinstance(facts.get("deviations"), dict) else {}
    means: list[tuple[str, Any, Any]] = [(name, facts.get(key), spread.get(key)) for key, name in _VTAB.items()]
    return tuple(
        (name, float(mean), float(deviation) if is_finite(deviation) and 0 <= deviation <= 1 else None)
        for name, mean, deviation in means
        if is_finite(mean) and 0 <= mean <= 1
    )


def _dataset(url: str) -> str:
    """The dataset of Table 2 that the last part of an address names; empty for any other."""
    name = _SPLIT.sub("", url.rstrip("/").rpartition("/")[2].lower())
    return _NAMES.get(re.sub(r"[^a-z0-9]", "", name), "")


def _figures(folder: Path) -> list[tuple[str, str]]:
    """Those that are there and are PNG files."""
    found = []
    for name, title in _FIGURES:
        try:
            data = read_local_file(folder / f"{name}.png", most_bytes=_MOST_FIGURE_BYTES)
        except (OSError, InvalidDataError):
            continue
        if data.startswith(_PNG):
            found.append((title, data_uri(data, "png")))
    return found
