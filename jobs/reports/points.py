"""Reads what `patchline compare` shows of each run from the run's files: its accuracy, and its cost in compute and
data.

The compute of a fine-tuned run includes the compute of the run that pre-trained its weights, and its number of images
is that of the pre-training dataset. Both are known only if the pre-training run's folder is still where the job says.
The repetitions of a sweep are one point. Facts that are not known are None, and the point gives the reason.

For a run that averages its weights, the accuracy is that of the averaged weights (those in RUN/weights), provided that
they were scored. If nothing was scored during the training, the accuracy is the one that `patchline evaluate RUN` kept.
A point can have further scores: on other datasets, and few-shot accuracy, which is measured during training or by
`patchline fewshot RUN/best --run-dir RUN/fewshot`.
"""

import json
import shlex
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from jobs.record import leaves_of, read_leaves, read_record
from jobs.reports.compare_names import (
    OPTIMIZERS,
    ScoredOn,
    dataset_names,
    fewshot_on,
    model_name,
    scored_on,
    sizes_of,
    what_differs,
)
from jobs.reports.run_scores import AlsoScored, accuracies, also_of, deviation_of, fewshot_in, means_of, scored_steps
from jobs.stages import WITH_SMOKE, job_class
from jobs.train.sweep import is_repetition, left_out, name_in_sweep, read_sweep, sweep_of
from pipeline.checkpoints.stored import read_best
from pipeline.models.config import MOST_CLASSES, ModelConfig
from pipeline.models.flops import num_parameters
from pipeline.planning.step_time import flops_of_steps
from pipeline.runs.curves import Curves
from pipeline.runs.summary_file import read_curves
from pipeline.shared_settings import METRICS_FILE, RECORD_FILE
from pipeline.training.settings.job import TeacherConfig, TrainingJob
from shards.errors import InvalidDataError, UserError
from shards.files.local_files import Line, is_finite, read_local_file
from shards.files.looks import is_a_file, is_there
from shards.files.typed_json import parse_json

_LOSS_COLUMNS = 200
_MOST_ANCESTORS, _MOST_CONFIG_BYTES = 4, 16 << 20
_BEFORE = "pretrained_by"  # this key in `sizes` has the optimiser that pre-trained the weights


@dataclass(frozen=True, kw_only=True)
class Point:
    """A run, or the repetitions of a sweep. The scores of repetitions are means with a sample standard deviation.

    `num_images`: the size of the dataset that the model was pre-trained on. `exaflops`: the compute of the completed
    steps, including pre-training. `own_exaflops`: the compute of the run's own steps, as far as it is known.
    `uncounted`: whose compute is not known, such as the teacher's; not empty if `exaflops` is None. `accuracies`: the
    accuracy at each step that was scored. `accuracy`: the last accuracy. `is_averaged`: whether this is the accuracy of
    averaged weights. `fewshot`: accuracy by the number of shots. `dataset`, `fewshot_dataset`: the names of the
    datasets that `accuracy` and `fewshot` are measured on. `also`: further scores. `label`: the model's name, with the
    sizes that tell it from others. `losses`: means of the training loss `loss_name` over successive ranges of steps,
    each with the last step of its range.
    `settings`: values by field; for repetitions, only those that all share. `differs`: the run's values of the settings
    in which the runs of its stage differ. `reasons`: why something is not known.
    """

    name: str
    stage: str
    model: str
    sizes: dict[str, str]
    num_parameters: int
    image_size: int
    step: int
    num_images: int | None
    exaflops: float | None
    own_exaflops: float
    uncounted: tuple[str, ...]
    accuracy: float | None
    best_accuracy: float | None
    fewshot: dict[int, float]
    command: str
    is_averaged: bool = False
    scored_on: ScoredOn | None = None
    fewshot_on: ScoredOn | None = None
    also: tuple[AlsoScored, ...] = ()
    dataset: str = ""
    fewshot_dataset: str = ""
    label: str = ""
    deviation: float | None = None
    best_deviation: float | None = None
    fewshot_deviation: dict[int, float] = field(default_factory=dict)
    num_runs: int = 1
    losses: tuple[tuple[int, float], ...] = ()
    accuracies: tuple[tuple[int, float], ...] = ()
    loss_name: str = ""
    global_batch: int = 1
    settings: dict[str, str] = field(default_factory=dict)
    differs: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        """The name of the plot line that the point belongs to. Points with the same label and stage are joined by a
        line. A point whose pre-training compute is not known belongs to a line of its own compute."""
        tuned = f"{self.label}, fine-tuned" if self.stage == "finetune" else self.label
        return f"{tuned}, its own compute" if self.exaflops is None else tuned

    @property
    def drawn(self) -> tuple[float | None, float | None]:
        """The accuracy that a plot shows, with its deviation: the best one for pre-training ("An Image is Worth 16x16
        Words", section 4.3), the last one for fine-tuning."""
        is_tuned = self.stage == "finetune"
        return (self.accuracy, self.deviation) if is_tuned else (self.best_accuracy, self.best_deviation)


@dataclass(kw_only=True)
class _Sweep:
    """The runs of a sweep that were found: the points of its repetitions, and the names of its other runs."""

    name: str
    facts: dict[str, Any] | None
    seeds: list[Point] = field(default_factory=list)
    others: list[str] = field(default_factory=list)


def gather(folders: Sequence[Path], *, root: Path) -> tuple[list[Point], list[str]]:
    """Returns a point for each run or for the repetitions of each sweep, and notes on folders that cannot be used and
    on a sweep's other runs. Names are relative to `root`."""
    points, notes = list[Point](), list[str]()
    sweeps: dict[Path, _Sweep] = {}
    for folder in folders:
        try:
            if read_leaves(folder / RECORD_FILE).get("stage") not in WITH_SMOKE and folder != root:
                continue  # for example an evaluation's folder
            point = point_of(folder, name=_name(folder, root))
        except (OSError, UserError, InvalidDataError) as error:
            notes.append(f"{_name(folder, root)}: {error}")
            continue
        if (path := sweep_of(folder)) is None:
            points.append(point)
            continue
        if path not in sweeps:
            given = folder.parent.parent
            name = _name(given if given.absolute() == path else path, root)
            sweeps[path] = _Sweep(name=name, facts=read_sweep(path))
        if is_repetition(folder, sweeps[path].facts):
            sweeps[path].seeds.append(point)
        else:  # for example a try, which was scored on held-out data to choose the values
            sweeps[path].others.append(name_in_sweep(folder))
    points += [repeated(one.seeds, name=one.name) for one in sweeps.values() if one.seeds]
    notes += [f"{one.name}: {left_out(one.others, one.facts)}" for one in sweeps.values() if one.others]
    return points, notes


def told_apart(points: Sequence[Point]) -> list[Point]:
    """Returns all points of a comparison in order. Each gets a label that no other model has, and names of datasets
    that no other dataset has."""
    known = [(one.scored_on, one.fewshot_on, *(more.on for more in one.also)) for one in points]
    names = dataset_names([on for each in known for on in each if on])
    kinds = {(one.model, one.stage, tuple(one.sizes.items())) for one in points}
    # Settings are compared within a stage, because different stages have different settings anyway.
    differing = {
        stage: iter(what_differs([one.settings for one in points if one.stage == stage])) for stage in WITH_SMOKE
    }
    found = []
    for one in points:
        # Resolution and optimiser are compared only within a stage: fine-tuned points have their own lines.
        own = {name: one.sizes[name] for name in ("image_size", "optimizer", _BEFORE) if name in one.sizes}
        alike = [(stage, dict(sizes)) for model, stage, sizes in kinds if model == one.model]
        others = [sizes if stage == one.stage else sizes | own for stage, sizes in alike]
        label = model_name(one.model, one.sizes, others=others)
        dataset = names[one.scored_on] if one.scored_on else ""
        few = names[one.fewshot_on] if one.fewshot_on else ""
        also = tuple(replace(more, dataset=names[more.on]) for more in one.also)
        found.append(
            replace(
                one, label=label, dataset=dataset, fewshot_dataset=few, also=also, differs=next(differing[one.stage])
            )
        )
    return sorted(found, key=_order)


def _order(one: Point) -> tuple[str, bool, int, str, float, str]:
    return one.model, one.stage == "finetune", one.num_parameters, one.line, one.exaflops or 0.0, one.name


def point_of(folder: Path, *, name: str, ancestors: int = 0, curves: Curves | None = None) -> Point:
    """Returns the point of one run. Raises OSError, UserError or InvalidDataError if its record cannot be read or is
    not a training job's. `ancestors`: the number of runs through which this one was reached, each by its initial
    weights. `curves`: what its metrics contain, if they have been read."""
    stage = read_leaves(folder / RECORD_FILE).get("stage", "")
    if stage not in WITH_SMOKE:
        raise UserError(f"its job.yaml is of {stage or 'no stage'}; allowed: {', '.join(WITH_SMOKE)}")
    job = read_record(folder / RECORD_FILE, stage=stage, kind=job_class(stage))
    curves = curves or read_curves(folder / METRICS_FILE)
    lines = curves.lines
    step = int(lines[-1]["step"]) if lines else 0
    model = replace(job.model, num_classes=job.model.num_classes or _num_classes(folder))
    has_head = model.num_classes > 0
    source, why_not = _source(job.initial.weights, folder, ancestors=ancestors) if job.initial.weights else (None, "")
    teacher, unknown = _teacher_of(job)
    own_flops = flops_of_steps(replace(job, model=model), step, teacher=teacher) * job.global_batch
    num_images, exaflops = _cost(job, lines, source, flops=own_flops)
    uncounted = (("its teacher",) if unknown else ()) + (("its initial weights",) if exaflops is None else ())
    exaflops = None if unknown else exaflops
    reasons = [unknown] if unknown else []
    reasons += [] if lines else ["no metrics yet"]
    reasons += [why_not] if why_not else []
    if lines and num_images is None and not job.initial.weights:
        reasons.append("the number of images is not in its metrics")
    with_sam = " with SAM" if job.optimizer.sam_rho else ""
    sizes = sizes_of(model) | {"optimizer": OPTIMIZERS[job.optimizer.name] + with_sam}
    if source:
        sizes[_BEFORE] = source.sizes.get(_BEFORE) or f"pre-trained by {source.sizes['optimizer']}"
    scores, is_averaged = accuracies(lines)
    if job.ema_decay and scores and not is_averaged:
        reasons.append("its accuracy is of the raw weights, not of the averaged ones in its weights folder")
    on, few_on = scored_on(job), fewshot_on(job.fewshot)
    if on and not on.part:
        on = replace(on, fingerprint=_scored_dataset(folder))
    also, why = also_of(folder, lines, job, is_best=stage != "finetune")
    if not scores and also and not also[0].shots:  # nothing was scored during the training, but later
        scores, on, also = [also[0].score], also[0].on, also[1:]
    also = tuple(one for one in also if one.shots or on is None or not _is_same(one.on, on))
    return Point(
        name=name,
        stage=stage,
        model=model.name,
        sizes=sizes,
        num_parameters=num_parameters(model, head=has_head),
        image_size=model.image_size,
        step=step,
        num_images=num_images,
        exaflops=exaflops,
        own_exaflops=own_flops / 1e18,
        uncounted=uncounted,
        accuracy=scores[-1] if scores else None,
        best_accuracy=max(scores, default=None),
        is_averaged=is_averaged,
        fewshot=fewshot_in(lines),
        scored_on=on,
        fewshot_on=few_on,
        also=also,
        dataset=on.name() if on else "",
        fewshot_dataset=few_on.name() if few_on else "",
        label=model_name(model.name, sizes_of(model)),
        losses=curves.losses.columns(_LOSS_COLUMNS),
        accuracies=scored_steps(curves, is_averaged=is_averaged, columns=_LOSS_COLUMNS),
        loss_name=_loss_name(job),
        global_batch=job.global_batch,
        settings=leaves_of(job),
        command=shlex.join(["patchline", stage, str(folder / RECORD_FILE), "--run-dir", "NEW"]),
        reasons=(*reasons, *why),
    )


def repeated(runs: Sequence[Point], *, name: str) -> Point:
    """Returns one point for the repetitions of a recipe, with the mean and the sample standard deviation of each
    score."""
    lasts = [one.accuracy for one in runs if one.accuracy is not None]
    bests = [one.best_accuracy for one in runs if one.best_accuracy is not None]
    shots = sorted({number for one in runs for number in one.fewshot})
    few = {number: [one.fewshot[number] for one in runs if number in one.fewshot] for number in shots}
    numbers = {"score": len(lasts)} | {f"{number}-shot accuracy": len(found) for number, found in few.items()}
    lacking = [
        f"{len(runs) - number} of {len(runs)} repetitions have no {what}"
        for what, number in numbers.items()
        if number < len(runs) and (number or not few)
    ]
    also, without = means_of([one.also for one in runs])
    return replace(
        runs[0],
        name=name,
        also=also,
        accuracy=statistics.fmean(lasts) if lasts else None,
        deviation=deviation_of(lasts),
        best_accuracy=statistics.fmean(bests) if bests else None,
        best_deviation=deviation_of(bests),
        fewshot={number: statistics.fmean(found) for number, found in few.items()},
        fewshot_deviation={number: one for number, found in few.items() if (one := deviation_of(found)) is not None},
        num_runs=len(runs),
        settings={
            name: value
            for name, value in runs[0].settings.items()
            if all(one.settings.get(name) == value for one in runs)
        },
        reasons=(*dict.fromkeys(reason for one in runs for reason in one.reasons), *lacking, *without),
    )


def point_json(point: Point) -> dict[str, Any]:
    """Returns the point as a JSON object for --json, without its curves and settings."""
    by_shots = {"fewshot": point.fewshot, "fewshot_deviation": point.fewshot_deviation}
    left_out = ("losses", "accuracies", "settings")
    facts = asdict(replace(point, losses=(), accuracies=(), settings={}))
    facts |= {name: {str(shots): x for shots, x in found.items()} for name, found in by_shots.items()}
    return {name: value for name, value in facts.items() if name not in left_out}


def final_run_of(weights: str) -> Path | None:
    """Returns the run whose final weights these are (RUN or RUN/weights); None if there is none. Weights in any other
    folder of RUN may come from any checkpoint, so they do not count."""
    path = Path(weights).absolute()  # `.` has no name
    folder = path.parent if path.name == "weights" and not is_a_file(path / RECORD_FILE) else path
    return folder if is_a_file(folder / RECORD_FILE) else None


def _source(weights: str, run_dir: Path, *, ancestors: int) -> tuple[Point | None, str]:
    """Returns the run that the weights are from (None: not known), and the reason if something about it is not known.
    A relative path is from the folder in which the run was started: the working folder or one above the run."""
    given = Path(weights)
    places = [given] if given.is_absolute() else [given, *(parent / given for parent in run_dir.resolve().parents)]
    place = next((str(one) for one in places if is_there(one)), weights)
    final = final_run_of(place)
    folder = final or Path(place).parent
    if ancestors >= _MOST_ANCESTORS or not is_a_file(folder / RECORD_FILE):
        if is_there(Path(place)):
            return None, f"its weights {weights!r} are of no run here: what their training took is not known"
        return None, f"its weights {weights!r} are not there: what their training took is not known"
    try:
        point = point_of(folder, name=str(folder), ancestors=ancestors + 1)
    except (OSError, UserError, InvalidDataError) as error:
        return None, f"the run of its weights {weights!r} cannot be read: {error}"
    if final:
        return point, ""
    why = f"its weights {weights!r} may be of any checkpoint of their run, so its compute is not known"
    return replace(point, exaflops=None), why


def _scored_dataset(run_dir: Path) -> str:
    """Returns the fingerprint of the dataset that the run is scored on; empty if it is not known."""
    try:
        best = read_best(run_dir)
    except (OSError, InvalidDataError):
        return ""
    return best.dataset if best else ""


def _is_same(one: ScoredOn, other: ScoredOn) -> bool:
    """Whether both are the same part of one dataset."""
    is_known = bool(one.fingerprint and other.fingerprint)
    is_one = one.fingerprint == other.fingerprint if is_known else one.urls == other.urls
    return is_one and one.part == other.part


def _loss_name(job: TrainingJob) -> str:
    """Returns the name of the loss that a job minimises. Losses of different names are of different scales."""
    model, teacher = job.model, job.teacher
    found: list[str] = [job.loss]
    if model.masked_patches:
        found = ["masked patches"]
        found += [f"target {model.masked_target}"] if model.masked_target != ModelConfig.masked_target else []
    elif teacher.weights:
        found = ["of a teacher"]
        found += [f"target {teacher.target}"] if teacher.target != TeacherConfig.target else []
        found += [f"share {teacher.share:g}"] if teacher.share != TeacherConfig.share else []
        found += [f"temperature {teacher.temperature:g}"] if teacher.temperature != TeacherConfig.temperature else []
    return ", ".join(found)


def _teacher_of(job: TrainingJob) -> tuple[ModelConfig | None, str]:
    """Returns the configuration of the job's teacher, if it has one, and the reason if it is not known."""
    if not job.teacher.weights:
        return None, ""
    from pipeline.training.teacher import teacher_config  # noqa: PLC0415 - loads torch

    try:
        return teacher_config(job), ""
    except UserError as error:
        return None, f"what its teacher computed is not known: {error}"


def _cost(
    job: TrainingJob, lines: Sequence[Line], source: Point | None, *, flops: float
) -> tuple[int | None, float | None]:
    """Returns the number of images in the pre-training dataset, and the exaFLOPs of all training. `source` is the run
    that the initial weights are from (None: none, or not known). `flops` is the compute of this run alone."""
    if not job.initial.weights:
        return _num_images(lines, global_batch=job.global_batch), flops / 1e18
    before = source.exaflops if source else None
    return source.num_images if source else None, None if before is None else flops / 1e18 + before


def _num_images(lines: Sequence[Line], *, global_batch: int) -> int | None:
    """Returns the number of samples in an epoch, computed from the step and the epoch in the run's metrics. The number
    is exact once the epoch has enough digits."""
    for line in reversed(lines):
        epoch = line.get("epoch")
        if epoch is not None and is_finite(epoch) and epoch > 0:
            return round(int(line["step"]) * global_batch / float(epoch))
    return None


def _num_classes(folder: Path) -> int:
    """Returns the number of classes in the run's final weights; 0 if there are none yet."""
    try:
        found = parse_json(read_local_file(folder / "weights" / "config.json", most_bytes=_MOST_CONFIG_BYTES))
        number = found["model"]["num_classes"] if isinstance(found, dict) else 0
    except (OSError, ValueError, KeyError, TypeError, InvalidDataError, json.JSONDecodeError):
        return 0
    return number if type(number) is int and 0 <= number <= MOST_CLASSES else 0


def _name(folder: Path, root: Path) -> str:
    return str(folder.relative_to(root)) if folder != root and folder.is_relative_to(root) else str(folder)
