"""What `patchline compare` knows of each run: accuracy, and what it cost in compute and data, from the runs' own files.

A fine-tuned run has the compute of the run that its weights are from as well, and that run's data, if its folder is
still where the job says. The repetitions of a sweep are one point. What is not known is None, with the reason.
"""

import json
import shlex
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jobs.record import read_record
from jobs.record_leaves import read_leaves
from jobs.stages import WITH_SMOKE, job_class
from pipeline.checkpoints.json_lines import Line, is_finite, is_step, read_lines
from pipeline.models.config import MOST_CLASSES
from pipeline.models.flops import num_parameters, training_flops
from shards.errors import InvalidDataError, UserError
from shards.local_file import read_local_file
from shards.typed_json import parse_json

_RECORD, _METRICS, _SWEEP = "job.yaml", "metrics.jsonl", "sweep.json"
_MOST_ANCESTORS, _MOST_CONFIG_BYTES = 4, 16 << 20
_FEWSHOT, _SHOTS = "fewshot/", "_shots"


@dataclass(frozen=True, kw_only=True)
class Point:
    """A run, or the repetitions of a sweep. `num_images`: of the data that the model was pre-trained on; `exaflops`: of
    all training, in steps that were done; `accuracy`: the last one, or the mean of the repetitions; `fewshot`: by the
    number of shots. `reasons`: why something is not known."""

    name: str
    stage: str
    model: str
    num_parameters: int
    image_size: int
    step: int
    num_images: int | None
    exaflops: float | None
    accuracy: float | None
    best_accuracy: float | None
    fewshot: dict[int, float]
    command: str
    deviation: float | None = None
    num_runs: int = 1
    reasons: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        """Whose points are joined in a plot: those of one model after one stage."""
        return f"{self.model}, fine-tuned" if self.stage == "finetune" else self.model


def gather(folders: Sequence[Path], *, root: Path) -> tuple[list[Point], list[str]]:
    """A point for each run, and a note for each folder that cannot be used. `root`: what names are relative to."""
    points, notes, seeds = list[Point](), list[str](), dict[Path, list[Point]]()
    for folder in folders:
        try:
            if read_leaves(folder / _RECORD).get("stage") not in WITH_SMOKE and folder != root:
                continue  # an evaluation's folder, say
            point = point_of(folder, name=_name(folder, root))
        except (OSError, UserError, InvalidDataError) as error:
            notes.append(f"{_name(folder, root)}: {error}")
            continue
        kind, sweep = folder.parent.name, folder.parent.parent
        if (sweep / _SWEEP).is_file() and kind in ("tries", "seeds"):
            if kind == "seeds":  # tries chose the values, on held-out data
                seeds.setdefault(sweep, []).append(point)
        else:
            points.append(point)
    points += [repeated(runs, name=_name(sweep, root)) for sweep, runs in seeds.items()]
    return sorted(points, key=lambda one: (one.line, one.exaflops or 0.0, one.name)), notes


def point_of(folder: Path, *, name: str, ancestors: int = 0) -> Point:
    """The point of one run. Raises OSError, UserError or InvalidDataError if its record is no training job."""
    stage = read_leaves(folder / _RECORD).get("stage", "")
    if stage not in WITH_SMOKE:
        raise UserError(f"its job.yaml is of {stage or 'no stage'}; allowed: {', '.join(WITH_SMOKE)}")
    job = read_record(folder / _RECORD, stage=stage, kind=job_class(stage))
    lines = read_lines(folder / _METRICS, is_usable=lambda line: is_step(line.get("step"))).objects
    step = int(lines[-1]["step"]) if lines else 0
    reasons = [] if lines else ["no metrics yet"]
    model = replace(job.model, num_classes=job.model.num_classes or _num_classes(folder))
    has_head = model.num_classes > 0
    flops = training_flops(model, head=has_head, is_frozen=job.optimizer.freeze_backbone)
    exaflops: float | None = flops * step * job.global_batch / 1e18
    num_images = _num_images(lines, global_batch=job.global_batch)
    if num_images is None and lines:
        reasons.append("the number of images is not in its metrics")
    if job.initial.weights:
        source, why = _source(job.initial.weights, ancestors=ancestors)
        num_images = source.num_images if source else None
        before = source.exaflops if source else None
        exaflops = None if before is None or exaflops is None else exaflops + before
        reasons += [why] if why else []
    accuracies = [float(line["test_accuracy"]) for line in lines if _is_share(line.get("test_accuracy"))]
    return Point(
        name=name,
        stage=stage,
        model=model.name,
        num_parameters=num_parameters(model, head=has_head),
        image_size=model.image_size,
        step=step,
        num_images=num_images,
        exaflops=exaflops,
        accuracy=accuracies[-1] if accuracies else None,
        best_accuracy=max(accuracies, default=None),
        fewshot=_fewshot(lines),
        command=shlex.join(["patchline", stage, str(folder / _RECORD), "--run-dir", "NEW"]),
        reasons=tuple(reasons),
    )


def repeated(runs: Sequence[Point], *, name: str) -> Point:
    """The repetitions of one recipe as one point: the mean of their last accuracies, and the deviation of a sample."""
    scored = [one for one in runs if one.accuracy is not None]
    accuracies = [one.accuracy for one in scored if one.accuracy is not None]
    few = () if len(scored) == len(runs) else (f"{len(runs) - len(scored)} of {len(runs)} repetitions have no score",)
    return replace(
        runs[0],
        name=name,
        accuracy=statistics.fmean(accuracies) if accuracies else None,
        deviation=statistics.stdev(accuracies) if len(accuracies) > 1 else None,
        best_accuracy=max((one.best_accuracy for one in runs if one.best_accuracy is not None), default=None),
        num_runs=len(runs),
        reasons=(*runs[0].reasons, *few),
    )


def facts_of(point: Point) -> dict[str, Any]:
    """As in --json."""
    return {**vars(point), "fewshot": {str(shots): value for shots, value in point.fewshot.items()}}


def final_run_of(weights: str) -> Path | None:
    """The run whose final weights these are (RUN or RUN/weights); None if there is none. Any other folder in RUN may
    have the weights of any of its checkpoints."""
    path = Path(weights).absolute()  # so that a dot has a name
    folder = path.parent if path.name == "weights" and not (path / _RECORD).is_file() else path
    return folder if (folder / _RECORD).is_file() else None


def _source(weights: str, *, ancestors: int) -> tuple[Point | None, str]:
    """The run that the weights are from, and what of it is not known, and why."""
    final = final_run_of(weights)
    folder = final or Path(weights).parent
    if ancestors >= _MOST_ANCESTORS or not (folder / _RECORD).is_file():
        return None, f"the run of its weights {weights!r} is not there, so its compute and data are not known"
    try:
        point = point_of(folder, name=str(folder), ancestors=ancestors + 1)
    except (OSError, UserError, InvalidDataError) as error:
        return None, f"the run of its weights {weights!r} cannot be read: {error}"
    if final:
        return point, ""
    why = f"its weights {weights!r} may be of any checkpoint of their run, so its compute is not known"
    return replace(point, exaflops=None), why


def _num_images(lines: Sequence[Line], *, global_batch: int) -> int | None:
    """Samples of an epoch, from how many epochs the run has done: exact once there are as many digits as it takes."""
    for line in reversed(lines):
        epoch = line.get("epoch")
        if epoch is not None and is_finite(epoch) and epoch > 0:
            return round(int(line["step"]) * global_batch / float(epoch))
    return None


def _num_classes(folder: Path) -> int:
    """Of the model that the run left; 0 if there is none yet."""
    try:
        found = parse_json(read_local_file(folder / "weights" / "config.json", most_bytes=_MOST_CONFIG_BYTES))
        number = found["model"]["num_classes"] if isinstance(found, dict) else 0
    except (OSError, ValueError, KeyError, TypeError, InvalidDataError, json.JSONDecodeError):
        return 0
    return number if type(number) is int and 0 <= number <= MOST_CLASSES else 0


def _fewshot(lines: Sequence[Line]) -> dict[int, float]:
    """The last few-shot accuracies, by the number of shots."""
    found: dict[int, float] = {}
    for line in lines:
        for key, value in line.items():
            shots = key.removeprefix(_FEWSHOT).removesuffix(_SHOTS)
            if key == f"{_FEWSHOT}{shots}{_SHOTS}" and shots.isdecimal() and len(shots) < 10 and _is_share(value):
                found[int(shots)] = float(value)
    return dict(sorted(found.items()))


def _is_share(value: Any) -> bool:
    return is_finite(value) and 0 <= value <= 1


def _name(folder: Path, root: Path) -> str:
    return str(folder.relative_to(root)) if folder != root and folder.is_relative_to(root) else str(folder)
