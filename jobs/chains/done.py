"""Says which tasks are complete and need no job, and which would fail again in another job.

The answer comes from the store and the markers or, for a stage that writes nothing, from the record of its tries. A
training run or a dataset that was made with other settings is refused, as the stage itself would refuse it. Scores that
were made with other settings are computed again.
"""

import json
import logging
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jobs import exit_codes
from jobs.chains.state import ChainJob, read_record_of
from jobs.chains.steps import Unit
from jobs.data.pack import complete, must_scan_again, sides_of, spec_of
from jobs.record import read_leaves, read_record
from jobs.submittable import Override, job_of_words
from jobs.train.trials import run_changes
from pipeline.checkpoints.manifest import STEPS
from pipeline.shared_settings import RECORD_FILE
from pipeline.training.reporting.ledger import last_line
from pipeline.training.saving.may_continue import WARMUP
from pipeline.training.settings.job import TrainingJob
from shards.config_values import differences, whole_number
from shards.dataset import open_dataset
from shards.errors import InvalidDataError, UnreachableError, UserError
from shards.files.local_files import MOST_LINE_BYTES, object_in, read_local_file, read_local_text, read_tail
from shards.files.looks import is_a_file, is_there, patiently
from shards.output.terminal import printable_name
from shards.packing.plan import read_plan
from shards.packing.survey import unscanned_parts
from shards.packing.write_shard import unpacked_parts
from shards.store import open_store

log = logging.getLogger(__name__)
STOPPED_BY_HAND = "cancelled"  # RUN/submit/cancelled, which `patchline cancel RUN` makes
_MOST_BYTES, _MOST_SCORES_BYTES = 1 << 20, 16 << 20
_MOST_SHOWN = 8
_NOT_OF_SCORES = ("run_dir", "device", "threads", "json")
_TRAINING = ("pretrain", "finetune")
# Ends after which another try would end the same way, in the words that stage.sbatch writes to tries.jsonl.
_HOPELESS = {
    "at fault": "ended with a mistake or a fault",
    "gave up": "saved nothing new in three tries",
    "told to stop": "was stopped by its file STOP",
}


def missing_tasks(unit: Unit, *, state: Path, override: Override) -> list[int]:
    """Returns the numbers of a unit's tasks that are not complete. Raises UserError if one was completed with other
    settings."""
    if unit.stage == "pack":
        return _missing_of_pack(unit, override)
    jobs = [job_of_words(list(words), override) for words in unit.words]
    return [
        number
        for number, (words, job) in enumerate(zip(unit.words, jobs, strict=True))
        if not _is_complete(unit, words, job, state=state)
    ]


def _missing_of_pack(unit: Unit, override: Override) -> list[int]:
    job = job_of_words(list(unit.words[0]), override)
    for side in sides_of(job):  # the last one is the job itself
        store, spec = open_store(side.out), spec_of(side)
        plan = read_plan(store, spec)
        if plan is not None and must_scan_again(store, plan, side):
            return list(range(unit.num_parts))
    if plan is not None and (job.phase in ("scan", "plan") or complete(store, plan)):
        return []
    if job.phase == "scan":
        return unscanned_parts(store, spec, url=job.out, num_parts=unit.num_parts)
    if job.phase == "shards":
        return unpacked_parts(store, plan, num_parts=unit.num_parts) if plan else list(range(unit.num_parts))
    return [0]


def _is_complete(unit: Unit, words: Sequence[str], job: Any, *, state: Path) -> bool:
    if unit.stage in _TRAINING:
        return is_trained(job, extends="--extend" in words)
    if unit.stage in ("evaluate", "fewshot"):
        return _is_scored(unit.stage, job)
    if unit.stage == "report":
        return _is_after(Path(job.out) if job.out else Path(job.run) / "report.html", Path(job.run) / "DONE")
    # A stage that writes nothing is done if all ranks of one of its jobs exited with 0.
    epoch = read_record_of(state).epoch
    records = (state / "jobs").glob(f"{unit.name}.e{epoch}.r*/patchline-*/submit/tries.jsonl")
    return any(_last_end(path) == "done" for path in records)


def tell_done(words: Sequence[str]) -> int:
    """Runs `patchline __done RUN`, which slurm/stage.sbatch calls before a job ends with 0. Returns 0 if the run is
    complete, else 1."""
    if len(words) != 1:
        raise UserError(f"__done takes one run directory; {len(words)} words were given")
    return exit_codes.FAULTS_FOUND if _trained_steps(Path(words[0])) is None else exit_codes.DONE


def is_trained(job: TrainingJob, *, extends: bool) -> bool:
    """Whether the job's run is complete and has at least as many steps as the job. Raises UserError if it finished with
    other values. `extends`: whether the job may have more steps than the finished run."""
    run_dir = Path(job.run_dir)
    if not is_there(run_dir / "DONE") or (num_steps := _trained_steps(run_dir)) is None:
        return False
    refuse_other_run(job, extends=extends)
    return num_steps >= job.steps


def _trained_steps(run_dir: Path) -> int | None:
    """Returns the number of steps in RUN/job.yaml if RUN/DONE says that all steps are done and matches the weights
    beside it. Otherwise logs why not, and returns None."""
    from pipeline.training.saving.finish import read_done  # noqa: PLC0415 - loads torch

    try:
        done = read_done(run_dir)
        num_steps = whole_number(read_leaves(run_dir / RECORD_FILE).get("job.steps", "")) or 0
    except (OSError, InvalidDataError) as error:
        log.error("%s: %s", run_dir / RECORD_FILE, error)
        return None
    if done is None:
        log.error("%s is missing, or does not vouch for the weights beside it", run_dir / "DONE")
    elif done.step < num_steps:
        log.error("%s is of step %s, and the run has %s steps", run_dir / "DONE", f"{done.step:,}", f"{num_steps:,}")
    else:
        return num_steps
    return None


def refuse_changed(stage: str, words: Sequence[str], job: Any) -> None:
    """Raises UserError if the step's dataset was planned, or its run was finished, with other values."""
    if stage == "pack":
        read_plan(open_store(job.out), spec_of(job))
    if stage in _TRAINING:
        refuse_other_run(job, extends="--extend" in words)


def refuse_other_run(job: TrainingJob, *, extends: bool) -> None:
    """Raises UserError if the job's folder holds a finished run with other values or another length. A run whose marker
    or record is damaged does not count as finished. `extends`: whether the job may have more steps than the finished
    run."""
    run_dir = Path(job.run_dir)
    if not is_there(run_dir / "DONE"):
        return
    from pipeline.training.saving.finish import done_from_json  # noqa: PLC0415 - loads torch

    try:
        done = done_from_json(read_local_text(run_dir / "DONE", most_bytes=_MOST_BYTES))
        num_steps = int(read_leaves(run_dir / RECORD_FILE).get("job.steps", "0"))
    except (OSError, ValueError, InvalidDataError):
        return
    found = run_changes(done.job.job | {STEPS: num_steps}, asdict(job), is_done=True, extends=extends)
    found = [each for each in found if each.field != "data.url" or not _holds(each.now, done.position.dataset)]
    # A change of length is listed first. The warm-up follows from the length, so its change is then left out.
    lengths = [each for each in found if each.field == STEPS]
    found = lengths + [each for each in found if each.field != STEPS and not (lengths and each.field == WARMUP)]
    if found:
        hint = "; to continue it with more steps, add --extend" if lengths and job.steps > num_steps else ""
        raise UserError(
            f"{job.run_dir} holds a run that finished with other values: {'; '.join(map(str, found[:_MOST_SHOWN]))}. "
            f"Use the same values, move it away, or give another --run-dir{hint}"
        )


def _holds(url: str, fingerprint: str | tuple[str, ...]) -> bool:
    """Whether the dataset at the URL is the one with this fingerprint. Raises UnreachableError if it cannot be
    reached."""
    try:
        return bool(url) and open_dataset(url).fingerprint == fingerprint
    except UnreachableError:
        raise
    except UserError:
        return False


def refuse_stopped(job: object) -> None:
    """Raises UserError if a file STOP keeps the job's training run stopped."""
    if isinstance(job, TrainingJob) and is_there(stop := Path(job.run_dir) / "STOP"):
        shown, todo = printable_name(str(stop)), printable_name(f"rm {shlex.quote(str(stop))}")
        raise UserError(f"{shown} keeps the run stopped, so its job would end at once; to continue it, first: {todo}")


def _is_scored(stage: str, job: Any) -> bool:
    """Whether the job's scores exist, were computed with its settings, and are no older than their job.yaml and the
    weights."""
    run_dir = Path(job.run_dir)
    path = run_dir / ("scores.json" if stage == "evaluate" else "fewshot.json")
    try:
        json.loads(read_local_file(path, most_bytes=_MOST_SCORES_BYTES))
    except (OSError, ValueError, RecursionError, InvalidDataError):
        return False
    causes = (run_dir / RECORD_FILE, Path(job.weights) / "model.safetensors")
    return is_scored_by(stage, job, run_dir) and all(_is_after(path, cause) for cause in causes)


def is_scored_by(stage: str, job: Any, run_dir: Path) -> bool:
    """Whether the evaluation in `run_dir` had the settings of this job. Its folder, device and threads may differ."""
    try:
        recorded = read_record(run_dir / RECORD_FILE, stage=stage, kind=type(job))
    except (OSError, UserError):
        return False
    return all(each.field in _NOT_OF_SCORES for each in differences(asdict(recorded), asdict(job)))


def _is_after(path: Path, cause: Path) -> bool:
    """Whether `path` exists and is not older than `cause`, from which it was made. If `cause` is missing, only `path`
    must exist."""
    return is_a_file(path) and (
        not is_there(cause) or patiently(path, path.stat).st_mtime >= patiently(cause, cause.stat).st_mtime
    )


def hopeless(unit: Unit, jobs: Sequence[ChainJob], *, state: Path) -> str:
    """Returns the reason why another job of the unit would end like the last ones, or an empty string if another job
    may succeed."""
    for run_dir in filter(None, unit.run_dirs()):
        if is_there(Path(run_dir) / "submit" / STOPPED_BY_HAND):
            return f"{unit.name} was cancelled by `patchline cancel {run_dir}`"
    if unit.may_fail:
        return ""
    for job in jobs:
        ends = list(_ends_of(unit, job).values())
        # Stages without a run directory have their records here:
        ends += [_last_end(path) for path in sorted((state / "jobs" / job.tag).glob("patchline-*/submit/tries.jsonl"))]
        if end := next((end for end in ends if end in _HOPELESS), ""):
            where = f"would end the same way again; see its log in {state / 'jobs'}"
            return f"{unit.name} {_HOPELESS[end]}, and {where}"
    return ""


def failed_alone(unit: Unit, jobs: Sequence[ChainJob]) -> set[int]:
    """For a unit whose runs may fail, returns the tasks whose runs have failed permanently in these jobs. Returns an
    empty set for other units."""
    if not unit.may_fail:
        return set()
    ends: dict[int, str] = {}
    for job in jobs:
        ends |= _ends_of(unit, job)
    return {task for task, end in ends.items() if end in ("at fault", "gave up")}


def _ends_of(unit: Unit, job: ChainJob) -> dict[int, str]:
    """Returns how the last try of each of the job's runs ended, by the number of its task."""
    records = _records_of(unit)
    return {task: _last_end(path, job.marks[task]) for task in job.tasks if (path := records.get(task))}


def _records_of(unit: Unit) -> dict[int, Path]:
    """Returns the path of each run's tries.jsonl, by the number of its task."""
    runs = enumerate(unit.run_dirs())
    return {number: Path(run_dir) / "submit" / "tries.jsonl" for number, run_dir in runs if run_dir}


def _last_end(path: Path, mark: int = 0) -> str:
    """Returns how the last try recorded after byte `mark` ended, or an empty string if there is none."""
    try:
        tail = read_tail(path, most_bytes=MOST_LINE_BYTES)
    except (OSError, InvalidDataError):
        return ""
    if tail is None:
        return ""
    lines = tail.data[max(0, mark - (tail.num_bytes - len(tail.data))) :].splitlines()
    line = object_in(lines[-1]) if lines else None
    return str(line.get("end", "")) if line else ""


def marks_of(unit: Unit) -> tuple[int, ...]:
    """Returns the size in bytes of each run's tries.jsonl. Lines appended after that come from jobs that are submitted
    later."""
    records = _records_of(unit)
    sizes = {number: patiently(path, path.stat).st_size for number, path in records.items() if is_there(path)}
    return tuple(sizes.get(number, 0) for number in range(len(unit.words)))


def saved_steps(unit: Unit) -> tuple[int, ...]:
    """Returns the last step that each of the unit's runs has saved, according to its ledger; 0 if there is none."""
    return tuple(int(last_line(Path(run_dir)).get("step", 0)) if run_dir else 0 for run_dir in unit.run_dirs())


def idle_rounds(jobs: Sequence[ChainJob], missing: Sequence[int], steps: Sequence[int]) -> int:
    """Returns how many rounds in a row, up to the last one, made no progress: no task was completed, and no run saved a
    later step. `jobs`: all jobs of the unit. `missing`, `steps`: its missing tasks and saved steps now. Pure."""
    after, later, idle = len(missing), sum(steps), 0
    for number in sorted({job.round for job in jobs}, reverse=True):
        mine = [job for job in jobs if job.round == number]
        before, earlier = len({task for job in mine for task in job.tasks}), sum(mine[0].steps)
        if after < before or later > earlier:
            break
        after, later, idle = before, earlier, idle + 1
    return idle
