"""Says what is done already and needs no job: a training run, scores, a packing, a step of a chain.

The answer comes from the store and the markers, never from exit codes. A training run or a dataset that was made with
other settings is refused, as the stage itself would refuse it; scores of other settings are computed again.
"""

import json
import logging
import shlex
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from jobs import exit_codes
from jobs.chains.state import ChainJob, read_record_of
from jobs.chains.steps import Unit
from jobs.data.pack import complete, spec_of
from jobs.record import read_leaves, read_record
from jobs.submittable import Override, job_of_words
from jobs.train.trials import run_changes
from pipeline.checkpoints.manifest import STEPS
from pipeline.training.reporting.ledger import last_line
from pipeline.training.saving.may_continue import WARMUP
from pipeline.training.settings.job import TrainingJob
from shards.config_values import differences, whole_number
from shards.dataset import open_dataset
from shards.errors import InvalidDataError, UnreachableError, UserError
from shards.files.local_files import read_local_text
from shards.output.terminal import printable_name
from shards.packing.plan import read_plan
from shards.packing.survey import unscanned_parts
from shards.packing.write_shard import unpacked_parts
from shards.store import open_store

log = logging.getLogger(__name__)
_MOST_BYTES = 1 << 20
_MOST_SHOWN = 8
_NOT_OF_SCORES = ("run_dir", "device", "threads", "json")
STOPPED_BY_HAND = "cancelled"  # RUN/submit/cancelled, of `patchline cancel RUN`
_HOPELESS = ("at fault", "gave up", "told to stop")  # as stage.sbatch writes them to tries.jsonl


def tell_done(words: Sequence[str]) -> int:
    """`patchline __done RUN`, which slurm/stage.sbatch asks before a job ends with 0. Returns 0 if the run is complete,
    else 1."""
    if len(words) != 1:
        raise UserError(f"__done takes one run directory; {len(words)} words were given")
    return exit_codes.DONE if _is_vouched_for(Path(words[0])) else exit_codes.FAULTS_FOUND


def _is_vouched_for(run_dir: Path) -> bool:
    """Whether RUN/DONE vouches for the weights beside it, at the last step of RUN/job.yaml; logs why if it does not."""
    from pipeline.training.saving.finish import read_done  # noqa: PLC0415 - loads torch

    try:
        done = read_done(run_dir)
        num_steps = whole_number(read_leaves(run_dir / "job.yaml").get("job.steps", ""))
    except (OSError, InvalidDataError) as error:
        log.error("%s: %s", run_dir / "job.yaml", error)
        return False
    if done is None:
        log.error("%s is missing, or does not vouch for the weights beside it", run_dir / "DONE")
    elif done.step < (num_steps or 0):
        log.error("%s is of step %s, and the run has %s steps", run_dir / "DONE", f"{done.step:,}", f"{num_steps:,}")
    else:
        return True
    return False


def has_steps(job: Any, *, extends: bool) -> bool:
    """Whether the run of a job of training is complete, with at least its steps. UserError if it is done with other
    values. `extends`: whether it may become longer."""
    run_dir = Path(job.run_dir)
    if not (run_dir / "DONE").exists() or not _is_vouched_for(run_dir):
        return False
    refuse_other_run(job, extends=extends)
    return bool(int(read_leaves(run_dir / "job.yaml").get("job.steps", "0")) >= job.steps)


def refuse_stopped(job: object) -> None:
    """UserError if a file STOP keeps the run of a job of training stopped."""
    if isinstance(job, TrainingJob) and (stop := Path(job.run_dir) / "STOP").exists():
        shown, todo = printable_name(str(stop)), printable_name(f"rm {shlex.quote(str(stop))}")
        raise UserError(f"{shown} keeps the run stopped, so its job would end at once; to continue it, first: {todo}")


def has_ended(job: object, *, extends: bool) -> bool:
    """Whether the run of a job of training is done: RUN/DONE vouches for its weights, at the last step of this job.
    UserError if it finished with other values, as training itself would say. If its data differs, training decides."""
    if not isinstance(job, TrainingJob) or not (Path(job.run_dir) / "DONE").exists():
        return False
    from pipeline.training.saving.finish import read_done  # noqa: PLC0415 - loads torch
    from pipeline.training.saving.may_continue import refuse_changes  # noqa: PLC0415

    done = read_done(Path(job.run_dir))
    if done is None or (extends and done.step != job.steps):  # the extended run keeps a warm-up that is not known here
        return False
    own_classes = job.model.num_classes or done.job.model.get("num_classes", 0)  # 0: those of the data
    job = replace(job, model=replace(job.model, num_classes=own_classes))
    is_done = done.step == job.steps
    begin = replace(done.position, seed=job.seed, global_batch=job.global_batch, image_size=job.model.image_size)
    refuse_changes(done.job, done.position, job=job, start=begin, is_done=is_done, extend=extends)
    return is_done and not run_changes(done.job.job, asdict(job), is_done=True, extends=extends)


def refuse_changed(stage: str, words: Sequence[str], job: Any) -> None:
    """UserError if what the step would make is complete, or planned, with other values."""
    if stage == "pack":
        read_plan(open_store(job.out), spec_of(job))
    if stage in ("pretrain", "finetune") and (Path(job.run_dir) / "DONE").exists():
        refuse_other_run(job, extends="--extend" in words)


def refuse_other_run(job: Any, *, extends: bool) -> None:
    """UserError if the run that is done in the job's folder was of other values, or of another length. `extends`:
    whether it may become longer. A damaged marker or record is no run that is done."""
    from pipeline.training.saving.finish import done_from_json  # noqa: PLC0415 - loads torch

    run_dir = Path(job.run_dir)
    try:
        done = done_from_json(read_local_text(run_dir / "DONE", most_bytes=_MOST_BYTES))
        num_steps = int(read_leaves(run_dir / "job.yaml").get("job.steps", "0"))
    except (OSError, ValueError, InvalidDataError):
        return
    found = run_changes(done.job.job | {STEPS: num_steps}, asdict(job), is_done=True, extends=extends)
    found = [each for each in found if each.field != "data.url" or not _holds(each.now, done.position.dataset)]
    lengths = [each for each in found if each.field == STEPS]  # is said first, without the warm-up, which follows it
    found = lengths + [each for each in found if each.field != STEPS and not (lengths and each.field == WARMUP)]
    if found:
        hint = "; to continue it with more steps, add --extend" if lengths and job.steps > num_steps else ""
        raise UserError(
            f"{job.run_dir} holds a run that finished with other values: {'; '.join(map(str, found[:_MOST_SHOWN]))}. "
            f"Use the same values, move it away, or give another --run-dir{hint}"
        )


def _holds(url: str, fingerprint: str | tuple[str, ...]) -> bool:
    """Whether the dataset at the URL is the one with this fingerprint."""
    try:
        return bool(url) and open_dataset(url).fingerprint == fingerprint
    except UnreachableError:
        raise
    except UserError:
        return False


def is_scored(stage: str, job: Any) -> bool:
    """Its scores are of this job, and of no older one or older weights: the record is written first."""
    run_dir = Path(job.run_dir)
    path = run_dir / ("scores.json" if stage == "evaluate" else "fewshot.json")
    try:
        json.loads(path.read_text())
    except (OSError, ValueError):
        return False
    causes = (run_dir / "job.yaml", Path(job.weights) / "model.safetensors")
    return is_scored_by(stage, job, run_dir) and all(is_after(path, cause) for cause in causes)


def is_after(path: Path, cause: Path) -> bool:
    """Whether a file is there, and not older than what it was made of; both times are of one file system."""
    return path.is_file() and (not cause.exists() or path.stat().st_mtime >= cause.stat().st_mtime)


def is_scored_by(stage: str, job: Any, run_dir: Path) -> bool:
    """Whether the record of an evaluation is that of this job, apart from where and how it is computed."""
    try:
        recorded = read_record(run_dir / "job.yaml", stage=stage, kind=type(job))
    except (OSError, UserError):
        return False
    return all(each.field in _NOT_OF_SCORES for each in differences(asdict(recorded), asdict(job)))


def missing_tasks(unit: Unit, *, state: Path, override: Override) -> list[int]:
    """The numbers of the tasks that are not complete."""
    if unit.stage == "pack":
        return _missing_of_pack(unit, override)
    return [
        number
        for number, words in enumerate(unit.words)
        if not _is_complete(unit, words, job_of_words(list(words), override), state=state)
    ]


def hopeless(unit: Unit, jobs: list[ChainJob], *, state: Path) -> str:
    """Why the unit's last jobs need not be submitted again: one message; empty if they may."""
    for run_dir in filter(None, unit.run_dirs()):
        if (Path(run_dir) / "submit" / STOPPED_BY_HAND).exists():
            return f"{unit.name} was cancelled by `patchline cancel {run_dir}`"
    if unit.may_fail:
        return ""
    for job in jobs:
        for number, run_dir in enumerate(unit.run_dirs()):
            mark = job.marks[number] if number < len(job.marks) else 0
            record = Path(run_dir) / "submit" / "tries.jsonl"
            if run_dir and number in job.tasks and (end := _last_end(record, mark)):
                return _message(unit, end, state / "jobs")
        # The records of stages without a run directory:
        for path in sorted((state / "jobs" / job.tag).glob("patchline-*/submit/tries.jsonl")):
            if end := _last_end(path, 0):
                return _message(unit, end, state / "jobs")
    return ""


def failed_alone(unit: Unit, jobs: Sequence[ChainJob]) -> set[int]:
    """The tasks whose runs cannot succeed, of a unit whose runs may fail: since these jobs were submitted."""
    if not unit.may_fail:
        return set()
    records = [Path(run_dir) / "submit" / "tries.jsonl" for run_dir in unit.run_dirs()]
    ends = {task: _last_end(records[task], job.marks[task]) for job in jobs for task in job.tasks}
    return {task for task, end in ends.items() if end in ("at fault", "gave up")}


def marks_of(unit: Unit) -> tuple[int, ...]:
    """The sizes of the runs' records of tries: what is behind them was written by jobs submitted from now on."""
    paths = [Path(run_dir) / "submit" / "tries.jsonl" if run_dir else None for run_dir in unit.run_dirs()]
    return tuple(path.stat().st_size if path and path.exists() else 0 for path in paths)


def saved_steps(unit: Unit) -> tuple[int, ...]:
    """The last step that each of the unit's runs has saved, by its ledger; 0: none."""
    return tuple(int(last_line(Path(run_dir)).get("step", 0)) if run_dir else 0 for run_dir in unit.run_dirs())


def idle_rounds(jobs: Sequence[ChainJob], missing: Sequence[int], steps: Sequence[int]) -> int:
    """How many of the last rounds in a row brought nothing: as many tasks were missing afterwards, and no run had saved
    a later step. `jobs`: all of the unit; `missing` and `steps`: as they are now. Pure."""
    after, later, idle = len(missing), sum(steps), 0
    for number in sorted({job.round for job in jobs}, reverse=True):
        mine = [job for job in jobs if job.round == number]
        before, earlier = len({task for job in mine for task in job.tasks}), sum(mine[0].steps)
        if after < before or later > earlier:
            break
        after, later, idle = before, earlier, idle + 1
    return idle


def _message(unit: Unit, end: str, folder: Path) -> str:
    what = {
        "at fault": "ended with a mistake or a fault",
        "gave up": "saved nothing new in three tries",
        "told to stop": "was stopped by its file STOP",
    }
    return f"{unit.name} {what[end]}, and would end the same way again; see its log in {folder}"


def _last_end(path: Path, mark: int) -> str:
    try:
        lines = path.read_bytes()[mark:].decode(errors="replace").splitlines()
        end = str(json.loads(lines[-1])["end"]) if lines else ""
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return end if end in _HOPELESS else ""


def _missing_of_pack(unit: Unit, override: Override) -> list[int]:
    job = job_of_words(list(unit.words[0]), override)
    store, spec = open_store(job.out), spec_of(job)
    plan, one = read_plan(store, spec), [0]
    if plan is not None and complete(store, plan):
        return []
    if job.phase == "scan":
        return [] if plan else unscanned_parts(store, spec, url=job.out, num_parts=unit.num_parts)
    if job.phase == "plan":
        return [] if plan else one
    if job.phase == "shards":
        return unpacked_parts(store, plan, num_parts=unit.num_parts) if plan else list(range(unit.num_parts))
    return one


def _is_complete(unit: Unit, words: Sequence[str], job: Any, *, state: Path) -> bool:
    if unit.stage in ("pretrain", "finetune"):
        return has_steps(job, extends="--extend" in words)
    if unit.stage in ("evaluate", "fewshot"):
        return is_scored(unit.stage, job)
    if unit.stage == "report":
        return is_after(Path(job.out) if job.out else Path(job.run) / "report.html", Path(job.run) / "DONE")
    return _is_on_record(unit, state=state)


def _is_on_record(unit: Unit, *, state: Path) -> bool:
    """Whether stage.sbatch recorded that all ranks ended well, for a stage that writes nothing."""
    epoch = read_record_of(state).epoch
    return any(
        '"end": "done"' in path.read_text(errors="replace")
        for path in (state / "jobs").glob(f"{unit.name}.e{epoch}.r*/patchline-*/submit/tries.jsonl")
    )
