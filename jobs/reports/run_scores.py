"""Reads the scores of a run from the run's files: its accuracies, further scores on other datasets, few-shot
accuracies, and the scores that `patchline evaluate` and `patchline fewshot` have kept in the run.
"""

import glob
import os
import statistics
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

from jobs.record import read_leaves, read_record
from jobs.reports.compare_names import ScoredOn, evaluated_on, fewshot_on
from jobs.settings.models import EvaluateJob, FewshotJob
from pipeline.runs.curves import Curves
from pipeline.shared_settings import RECORD_FILE, SCORES_FILE, SCORES_FOLDER
from pipeline.training.settings.job import TrainingJob
from shards.config_values import Range
from shards.errors import InvalidDataError, UserError
from shards.files import typed_json
from shards.files.local_files import Line, is_finite, read_local_file
from shards.files.looks import is_a_file, is_there
from shards.output.quantities import plural

_FEWSHOT, _SHOTS = "fewshot/", "_shots"
_RAW, _AVERAGED = "test_accuracy", "test_ema_accuracy"
_FOLDER, _RESULTS, _MOST_BYTES = "fewshot", "fewshot.json", 16 << 20
_MOST_KEPT = 256  # folders with scores in a run
_MOST_SEARCHED = 1000  # folders that are searched for an evaluation with a folder of its own
Share = Annotated[float, Range(0, 1)]
Count = Annotated[int, Range(0)]


@dataclass(frozen=True, kw_only=True)
class ScoreLine:
    """The content of scores.json: the fields of pipeline.evaluation.scores.Scores, the fingerprint of the scored
    dataset, and the step of the weights if they are a completed run's own."""

    dataset: str
    step: Annotated[int, Range(0)] | None
    num_images: Count
    num_unlabeled: Count
    accuracy: Share
    top5: Share
    mean_per_class: Share
    calibration_error: Share
    loss: float
    chance: Share


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


def scored_steps(curves: Curves, *, is_averaged: bool, columns: int) -> tuple[tuple[int, float], ...]:
    """Returns the accuracy at each scored step, or at about `columns` of them if there are more."""
    curve = curves.named(_AVERAGED if is_averaged else _RAW)
    return tuple((step, value) for step, value in curve.envelope(columns) if is_share(value)) if curve else ()


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
    """Returns all further scores of a run, and reasons why some cannot be used. Scores that `patchline evaluate` kept
    come first, the newest first."""
    kept, reasons = evaluations_of(run_dir, step=int(lines[-1]["step"]) if lines else 0)
    few, why = fewshot_of(run_dir)
    found = [*kept, *also_in(lines, job, is_best=is_best), *few]
    return tuple(replace(one, dataset=one.on.name()) for one in found), [*reasons, *([why] if why else [])]


def evaluations_of(run_dir: Path, *, step: int) -> tuple[list[AlsoScored], list[str]]:
    """Returns the accuracies that `patchline evaluate` has kept in RUN/scores (or nearby, see evaluation_folders), the
    newest first, one for each dataset and each way to score it, and reasons why some cannot be used. `step`: the last
    step of the run; scores of an earlier step are left out."""
    found, reasons = dict[ScoredOn, AlsoScored](), list[str]()
    try:
        folders = evaluation_folders(run_dir)
    except OSError as error:
        return [], [f"{SCORES_FOLDER} cannot be read: {error.strerror or error}"]
    for folder in folders:
        where = os.path.relpath(folder.resolve(), run_dir.resolve())
        try:
            job = read_record(folder / RECORD_FILE, stage="evaluate", kind=EvaluateJob)
            scores = typed_json.read_record(ScoreLine, read_local_file(folder / SCORES_FILE, most_bytes=_MOST_BYTES))
        except (OSError, ValueError, UserError, InvalidDataError) as error:
            reasons.append(f"{where}/{SCORES_FILE} cannot be used: {error}")
            continue
        if others_weights(job.weights, run_dir):
            continue
        if scores.step not in (None, step):
            reasons.append(f"{where} is of step {scores.step:,}, and the run has gone on: evaluate it again")
            continue
        on = evaluated_on(job, fingerprint=scores.dataset)
        found.setdefault(on, AlsoScored(on=on, score=scores.accuracy))
    return list(found.values()), reasons


def evaluation_folders(run_dir: Path) -> list[Path]:
    """Returns the folders with scores of a run, the newest first: those in RUN/scores, which may also be such a folder
    itself. If there are none, returns the folder of the newest evaluation of the run's own weights that was given a
    folder of its own: in the run's folder or next to it or, in a chain whose steps have several runs, with the run's
    number in another step."""
    parent = run_dir / SCORES_FOLDER
    there = [path.parent for path in islice(parent.glob(f"*/{SCORES_FILE}"), _MOST_KEPT)]
    there += [parent] if is_a_file(parent / SCORES_FILE) else []
    times = []
    for folder in there:
        try:
            times.append(((folder / SCORES_FILE).stat().st_mtime, folder))
        except OSError:
            continue  # removed meanwhile
    return [folder for _, folder in sorted(times, reverse=True)] or _nearby_evaluation(run_dir)


def _nearby_evaluation(run_dir: Path) -> list[Path]:
    own = run_dir.resolve()
    places = ((own, "*"), (own.parent, "*"), (own.parent.parent, f"*/{glob.escape(own.name)}"))
    there = (path for parent, pattern in places for path in parent.glob(f"{pattern}/{SCORES_FILE}"))
    found: list[tuple[float, Path]] = []
    for path in islice(there, _MOST_SEARCHED):
        with suppress(OSError, UserError, InvalidDataError):
            leaves = read_leaves(path.parent / RECORD_FILE)
            weights = leaves.get("job.weights", "")
            if leaves["stage"] == "evaluate" and weights and not others_weights(weights, own):
                found.append((path.stat().st_mtime, path.parent))
    return [max(found)[1]] if found else []


def others_weights(weights: str, run_dir: Path) -> str:
    """Returns `weights` if they are not the run's own, otherwise an empty string. Weights at a path that no longer
    exists count as the run's own if the path has the run's name: the run was probably moved."""
    own, said = run_dir.resolve(), Path(weights).resolve()
    was = said.parent if said.name == "weights" else said
    is_own = was == own or (was.name == own.name and not is_there(was))
    return "" if not weights or is_own else weights


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
        facts = typed_json.parse_json(read_local_file(folder / _RESULTS, most_bytes=_MOST_BYTES))
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
