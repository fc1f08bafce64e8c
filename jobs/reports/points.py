"""Reads what `patchline compare` shows of each run from the run's files: its accuracy, and its cost in compute and
data.

The compute of a fine-tuned run includes the compute of the run that pre-trained its weights, and its number of images
is that of the pre-training dataset. Both are known only if the pre-training run's folder is still where the job says.
The repetitions of a sweep are one point. Facts that are not known are None, and the point gives the reason.

For a run that averages its weights, the accuracy is that of the averaged weights (those in RUN/weights), provided that
they were scored. A point can have further scores: on other datasets, and few-shot accuracy, which is measured during
training or by
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
    ScoredOn,
    dataset_names,
    fewshot_on,
    model_name,
    scored_on,
    sizes_of,
    what_differs,
)
from jobs.settings.models import FewshotJob
from jobs.stages import WITH_SMOKE, job_class
from jobs.train.sweep import is_repetition, left_out, name_in_sweep, read_sweep, sweep_of
from pipeline.models.config import MOST_CLASSES
from pipeline.models.flops import num_parameters, training_flops
from pipeline.runs.curves import Curves
from pipeline.runs.summary_file import read_curves
from pipeline.shared_settings import METRICS_FILE, RECORD_FILE
from pipeline.training.settings.job import TrainingJob
from shards.errors import InvalidDataError, UserError
from shards.files.local_files import Line, is_finite, read_local_file
from shards.files.looks import is_a_file, is_there
from shards.files.typed_json import parse_json
from shards.output.quantities import plural

_FEWSHOT, _SHOTS = "fewshot/", "_shots"
_RAW, _AVERAGED = "test_accuracy", "test_ema_accuracy"
_FOLDER, _RESULTS, _MOST_BYTES = "fewshot", "fewshot.json", 16 << 20
_LOSS_COLUMNS = 200
_MOST_ANCESTORS, _MOST_CONFIG_BYTES = 4, 16 << 20
_BEFORE = "pretrained_by"  # this key in `sizes` has the optimiser that pre-trained the weights
_OPTIMIZERS = {"adamw": "AdamW", "sgd": "SGD", "muon": "Muon"}


@dataclass(frozen=True, kw_only=True)
class AlsoScored:
    """A further score of a run. `shots`: the number of shots of a few-shot accuracy, else 0. `dataset`: the name of the
    dataset that the score is measured on. `weights`: the name of the weights if they are not the run's last.
    `deviation`: the standard deviation over choices of shots or, for a point of several repetitions, over the
    repetitions."""

    on: ScoredOn
    score: float
    shots: int = 0
    deviation: float | None = None
    weights: str = ""
    dataset: str = ""

    def words(self) -> str:
        """Returns a text such as `digits-test: 0.4920 ± 0.0100 (5 shots, best)`."""
        spread = "" if self.deviation is None else f" ± {self.deviation:.4f}"
        shots = plural(self.shots, "shot") if self.shots else ""
        about = ", ".join(filter(None, (shots, self.weights)))
        return f"{self.dataset}: {self.score:.4f}{spread}" + (f" ({about})" if about else "")


def accuracies(lines: Sequence[Line]) -> tuple[list[float], bool]:
    """Returns all accuracies, and whether they are those of the averaged weights. The last line with a score decides
    this."""
    key = _key(lines)
    return [float(line[key]) for line in lines if is_share(line.get(key))], key == _AVERAGED


def fewshot_in(lines: Sequence[Line]) -> dict[int, float]:
    """Returns the last few-shot accuracies, by the number of shots."""
    found: dict[int, float] = {}
    for line in lines:
        for key, value in line.items():
            shots = key.removeprefix(_FEWSHOT).removesuffix(_SHOTS)
            if key == f"{_FEWSHOT}{shots}{_SHOTS}" and shots.isdecimal() and len(shots) < 10 and is_share(value):
                found[int(shots)] = float(value)
    return dict(sorted(found.items()))


def also_of(
    run_dir: Path, lines: Sequence[Line], job: TrainingJob, *, is_best: bool
) -> tuple[tuple[AlsoScored, ...], list[str]]:
    """Returns all further scores of a run, and reasons why some cannot be used."""
    few, why = fewshot_of(run_dir)
    found = [*also_in(lines, job, is_best=is_best), *few]
    return tuple(replace(one, dataset=one.on.name()) for one in found), [why] if why else []


def also_in(lines: Sequence[Line], job: TrainingJob, *, is_best: bool) -> list[AlsoScored]:
    """Returns the scores on the run's other evaluation datasets, at its last scored step or, with `is_best`, at the
    step with the best accuracy (early stopping)."""
    key = _key(lines)
    scored = [line for line in lines if is_share(line.get(key))]
    if not scored:
        return []
    line = max(scored, key=lambda one: float(one[key])) if is_best else scored[-1]
    ending = "ema_accuracy" if key == _AVERAGED else "accuracy"
    sets = job.evaluation.sets(has_held_out=not job.data.held_out.is_none)
    found: list[tuple[str, Any]] = [(url, line.get(f"eval/{name}/{ending}")) for name, url in sets.items() if name]
    return [AlsoScored(on=ScoredOn(urls=(url,)), score=float(value)) for url, value in found if is_share(value)]


def fewshot_of(run_dir: Path) -> tuple[list[AlsoScored], str]:
    """Returns the scores that `patchline fewshot ... --run-dir RUN/fewshot` measured for this run's weights, or no
    scores and the reason why they cannot be used. Both are empty if the command was not run."""
    folder = run_dir / _FOLDER
    if not is_there(folder / _RESULTS):
        return [], ""
    try:
        job = read_record(folder / RECORD_FILE, stage="fewshot", kind=FewshotJob)
        facts = parse_json(read_local_file(folder / _RESULTS, most_bytes=_MOST_BYTES))
        if (facts["weights"], facts["data_url"]) != (job.weights, job.data.url):
            return [], f"{_FOLDER}/{_RESULTS} is not of the job beside it: measure again"
        results = [(one["shots"], one["ridge_mean"], one["ridge_deviation"], one["ridge"]) for one in facts["results"]]
    except (OSError, ValueError, KeyError, TypeError, UserError, InvalidDataError) as error:
        return [], f"{_FOLDER}/{_RESULTS} cannot be used: {error}"
    given, on = Path(job.weights), fewshot_on(job.data)
    if on is None or (is_there(given) and not given.resolve().is_relative_to(run_dir.resolve())):
        return [], f"{_FOLDER}/{_RESULTS} is of the weights {job.weights!r}, not of this run's"
    weights = "" if given.resolve() == run_dir.resolve() else given.name
    return [
        AlsoScored(on=on, score=mean, shots=shots, deviation=spread if len(each) > 1 else None, weights=weights)
        for shots, mean, spread, each in results
        if type(shots) is int and shots > 0 and is_share(mean) and is_share(spread) and isinstance(each, list)
    ], ""


def means_of(runs: Sequence[Sequence[AlsoScored]]) -> tuple[tuple[AlsoScored, ...], list[str]]:
    """Returns the further scores of repetitions as means with deviations, and notes on repetitions that lack a
    score."""
    kinds = dict.fromkeys((one.on, one.shots, one.weights) for run in runs for one in run)
    found, lacking = list[AlsoScored](), list[str]()
    for kind in kinds:
        own = [one for run in runs for one in run if (one.on, one.shots, one.weights) == kind]
        scores = [one.score for one in own]
        spread = deviation_of(scores) if len(runs) > 1 else own[0].deviation
        found.append(replace(own[0], score=statistics.fmean(scores), deviation=spread))
        if len(own) < len(runs):
            what = f"{own[0].shots}-shot accuracy" if own[0].shots else "score"
            lacking.append(f"{len(runs) - len(own)} of {len(runs)} repetitions have no {what} on {kind[0].name()}")
    return tuple(found), lacking


def deviation_of(found: Sequence[float]) -> float | None:
    """Returns the sample standard deviation; None for fewer than two values."""
    return statistics.stdev(found) if len(found) > 1 else None


def is_share(value: Any) -> bool:
    """Whether the value is a number from 0 to 1."""
    return is_finite(value) and 0 <= value <= 1


def _key(lines: Sequence[Line]) -> str:
    scored = [line for line in lines if is_share(line.get(_RAW)) or is_share(line.get(_AVERAGED))]
    return _AVERAGED if scored and is_share(scored[-1].get(_AVERAGED)) else _RAW


@dataclass(frozen=True, kw_only=True)
class Point:
    """A run, or the repetitions of a sweep. The scores of repetitions are means with a sample standard deviation.

    `num_images`: the size of the dataset that the model was pre-trained on. `exaflops`: the compute of the completed
    steps, including pre-training. `accuracy`: the last accuracy. `is_averaged`: whether this is the accuracy of
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
    loss_name: str = ""
    global_batch: int = 1
    settings: dict[str, str] = field(default_factory=dict)
    differs: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        """The name of the plot line that the point belongs to. Points with the same label and stage are joined by a
        line."""
        return f"{self.label}, fine-tuned" if self.stage == "finetune" else self.label

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
    is_frozen, skips = job.optimizer.freeze_backbone, job.engine.skip_branches
    flops = training_flops(model, head=has_head, is_frozen=is_frozen, skips_branches=skips)
    source, why_not = _source(job.initial.weights, ancestors=ancestors) if job.initial.weights else (None, "")
    num_images, exaflops = _cost(job, lines, source, flops=flops * step * job.global_batch)
    reasons = [] if lines else ["no metrics yet"]
    reasons += [why_not] if why_not else []
    if lines and num_images is None and not job.initial.weights:
        reasons.append("the number of images is not in its metrics")
    sizes = sizes_of(model) | {"optimizer": _OPTIMIZERS[job.optimizer.name]}
    if source:
        sizes[_BEFORE] = source.sizes.get(_BEFORE) or f"pre-trained by {source.sizes['optimizer']}"
    scores, is_averaged = accuracies(lines)
    if job.ema_decay and scores and not is_averaged:
        reasons.append("its accuracy is of the raw weights, not of the averaged ones in its weights folder")
    on, few_on = scored_on(job), fewshot_on(job.fewshot)
    also, why = also_of(folder, lines, job, is_best=stage != "finetune")
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
        loss_name="masked patches" if job.model.masked_patches else job.loss,
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
    """Returns the point as a JSON object for --json, without `losses` and `settings`."""
    by_shots = {"fewshot": point.fewshot, "fewshot_deviation": point.fewshot_deviation}
    facts = asdict(replace(point, losses=(), settings={}))
    facts |= {name: {str(shots): x for shots, x in found.items()} for name, found in by_shots.items()}
    return {name: value for name, value in facts.items() if name not in ("losses", "settings")}


def final_run_of(weights: str) -> Path | None:
    """Returns the run whose final weights these are (RUN or RUN/weights); None if there is none. Weights in any other
    folder of RUN may come from any checkpoint, so they do not count."""
    path = Path(weights).absolute()  # `.` has no name
    folder = path.parent if path.name == "weights" and not is_a_file(path / RECORD_FILE) else path
    return folder if is_a_file(folder / RECORD_FILE) else None


def _source(weights: str, *, ancestors: int) -> tuple[Point | None, str]:
    """Returns the run that the weights are from (None: not known), and the reason if something about it is not
    known."""
    final = final_run_of(weights)
    folder = final or Path(weights).parent
    if ancestors >= _MOST_ANCESTORS or not is_a_file(folder / RECORD_FILE):
        return None, f"the run of its weights {weights!r} is not there, so its compute and data are not known"
    try:
        point = point_of(folder, name=str(folder), ancestors=ancestors + 1)
    except (OSError, UserError, InvalidDataError) as error:
        return None, f"the run of its weights {weights!r} cannot be read: {error}"
    if final:
        return point, ""
    why = f"its weights {weights!r} may be of any checkpoint of their run, so its compute is not known"
    return replace(point, exaflops=None), why


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
