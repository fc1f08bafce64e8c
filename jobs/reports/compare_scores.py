"""The scores of a run that a comparison shows, from its own files: on the dataset that it is judged by, on others, and
few-shot, in the run and by `patchline fewshot RUN/best --run-dir RUN/fewshot`."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jobs.record import read_record
from jobs.reports.compare_names import ScoredOn, fewshot_on
from jobs.settings.models import FewshotJob
from pipeline.training.settings.job import TrainingJob
from shards.errors import InvalidDataError, UserError
from shards.files.local_files import Line, is_finite, read_local_file
from shards.files.typed_json import parse_json
from shards.output.quantities import plural

_FEWSHOT, _SHOTS = "fewshot/", "_shots"
_RAW, _AVERAGED = "test_accuracy", "test_ema_accuracy"
_FOLDER, _RESULTS, _MOST_BYTES = "fewshot", "fewshot.json", 16 << 20


@dataclass(frozen=True, kw_only=True)
class AlsoScored:
    """A further score of a run, as plots draw it. `shots`: of a few-shot accuracy, else 0; `dataset`: name of what it
    is on; `weights`: whose it is, if not of the run as it went. Its deviation is over choices of shots, or, of
    repetitions, over these."""

    on: ScoredOn
    score: float
    shots: int = 0
    deviation: float | None = None
    weights: str = ""
    dataset: str = ""

    def words(self) -> str:
        """Such as `digits-test: 0.4920 ± 0.0100 (5 shots, best)`."""
        spread = "" if self.deviation is None else f" ± {self.deviation:.4f}"
        shots = plural(self.shots, "shot") if self.shots else ""
        about = ", ".join(filter(None, (shots, self.weights)))
        return f"{self.dataset}: {self.score:.4f}{spread}" + (f" ({about})" if about else "")


def accuracies(lines: Sequence[Line]) -> tuple[list[float], bool]:
    """All accuracies of the averaged weights if the last line with a score has one, else those of the raw ones; and
    which."""
    key = _key(lines)
    return [float(line[key]) for line in lines if is_share(line.get(key))], key == _AVERAGED


def fewshot_in(lines: Sequence[Line]) -> dict[int, float]:
    """The last few-shot accuracies, by the number of shots."""
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
    """All further scores of a run, and why some cannot be used."""
    few, why = fewshot_of(run_dir)
    found = [*also_in(lines, job, is_best=is_best), *few]
    return tuple(replace(one, dataset=one.on.name()) for one in found), [why] if why else []


def also_in(lines: Sequence[Line], job: TrainingJob, *, is_best: bool) -> list[AlsoScored]:
    """The scores on the other datasets that the run is scored on, after its last step that was scored, or, with
    `is_best`, after the step with the best accuracy (early stopping)."""
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
    """What `patchline fewshot ... --run-dir RUN/fewshot` has measured of this run's weights, and why it cannot be used;
    nothing if it was not run."""
    folder = run_dir / _FOLDER
    if not (folder / _RESULTS).exists():
        return [], ""
    try:
        job = read_record(folder / "job.yaml", stage="fewshot", kind=FewshotJob)
        facts = parse_json(read_local_file(folder / _RESULTS, most_bytes=_MOST_BYTES))
        if (facts["weights"], facts["data_url"]) != (job.weights, job.data.url):
            return [], f"{_FOLDER}/{_RESULTS} is not of the job beside it: measure again"
        results = [(one["shots"], one["ridge_mean"], one["ridge_deviation"], one["ridge"]) for one in facts["results"]]
    except (OSError, ValueError, KeyError, TypeError, UserError, InvalidDataError) as error:
        return [], f"{_FOLDER}/{_RESULTS} cannot be used: {error}"
    given, on = Path(job.weights), fewshot_on(job.data)
    if on is None or (given.exists() and not given.resolve().is_relative_to(run_dir.resolve())):
        return [], f"{_FOLDER}/{_RESULTS} is of the weights {job.weights!r}, not of this run's"
    weights = "" if given.resolve() == run_dir.resolve() else given.name
    return [
        AlsoScored(on=on, score=mean, shots=shots, deviation=spread if len(each) > 1 else None, weights=weights)
        for shots, mean, spread, each in results
        if type(shots) is int and shots > 0 and is_share(mean) and is_share(spread) and isinstance(each, list)
    ], ""


def means_of(runs: Sequence[Sequence[AlsoScored]]) -> tuple[tuple[AlsoScored, ...], list[str]]:
    """The further scores of repetitions as means with deviations, and what some of these lack."""
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
    """The standard deviation of a sample; None for one value."""
    return statistics.stdev(found) if len(found) > 1 else None


def is_share(value: Any) -> bool:
    """Whether it is a number from 0 to 1."""
    return is_finite(value) and 0 <= value <= 1


def _key(lines: Sequence[Line]) -> str:
    scored = [line for line in lines if is_share(line.get(_RAW)) or is_share(line.get(_AVERAGED))]
    return _AVERAGED if scored and is_share(scored[-1].get(_AVERAGED)) else _RAW
