"""What a unit of a chain still lacks, and which faults cannot be fixed by submitting it again.

This is read from the store and the markers, never from exit codes.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jobs.chains.done import has_steps, is_after, is_scored
from jobs.chains.state import ChainJob, read_record_of
from jobs.chains.units import Unit
from jobs.data.pack import complete, spec_of
from jobs.submittable import Override, job_of_words
from pipeline.training.reporting.ledger import last_line
from shards.packing.missing import unpacked_parts, unscanned_parts
from shards.packing.plan import read_plan
from shards.store import open_store

STOPPED_BY_HAND = "cancelled"  # RUN/submit/cancelled, of `patchline cancel RUN`
_HOPELESS = ("at fault", "gave up", "told to stop")  # as stage.sbatch writes them to tries.jsonl


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
