"""Reads and writes the state of a chain, in FOLDER/chain: the frozen steps, the record of its jobs, and how it ended.

plan.json       the frozen steps; chain.yaml and cluster.yaml beside it are copies for people
record.jsonl    one line each time the chain begins, a job is submitted or a unit completes
gave-up         one message: why the chain ended before all units were complete
cancelled       written by `patchline cancel` before anything is cancelled
done            written when all units are complete
"""

import hashlib
import json
import os
import secrets
import shlex
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from jobs.chains.steps import STATE, Unit
from jobs.cluster.recorded_jobs import RecordedJob
from shards.errors import PASSING_FAULTS, InvalidDataError, UserError
from shards.files.local_files import append_line, object_in, read_local_file
from shards.files.looks import is_a_file, is_a_folder, is_there, patiently
from shards.files.typed_json import read_record

GAVE_UP, CANCELLED, DONE, PLAN, RECORD = "gave-up", "cancelled", "done", "plan.json", "record.jsonl"
GATE = "gate"
_MOST_BYTES, _MOST_MESSAGE = 64 << 20, 1 << 14
_LEVELS = 2  # by default, a chain's run is in FOLDER/STEP or FOLDER/STEP/NUMBER


@dataclass(frozen=True, kw_only=True)
class ChainPlan:
    """A frozen chain. `name`: the chain's name, which is in the comment of each of its jobs. `chdir`: the folder that
    relative paths start from. `command`: the command that runs patchline. `gate_minutes`: the time limit of gates."""

    name: str
    units: tuple[Unit, ...]
    rounds: int
    chdir: str
    command: tuple[str, ...]
    gate_minutes: int = 30  # a gate waits at most 10 minutes for Slurm

    def job_name(self, unit: Unit) -> str:
        """Returns the name of a unit's jobs. The links of a unit (its jobs, one after another) wait for each other by
        name, so the name must not occur in another chain."""
        return f"{unit.name}-{self.name[-8:]}" if unit.links > 1 else unit.name


@dataclass(frozen=True, kw_only=True)
class ChainJob:
    """A submitted job. `kind`: job or gate. `round`: 0 for the first submission. `tasks`: the numbers of the unit's
    tasks. `marks`: the size in bytes of each run's tries.jsonl at submission. `steps`: the last step that each run had
    saved by then. `offset`: what to add to a task's number in its array to get its number in the unit."""

    unit: str
    kind: str
    round: int
    tag: str
    job: int
    tasks: tuple[int, ...] = ()
    marks: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()
    offset: int = 0


@dataclass(frozen=True, kw_only=True)
class Record:
    """The events since the chain last began. `epoch`: how many times it has begun. `life`: a token that tells this
    chain's jobs from those of an earlier chain in the same folder; empty before the chain began. `folder`: the inode of
    the chain's folder, which tells the folder from a copy; 0 before the chain began."""

    epoch: int
    jobs: tuple[ChainJob, ...]
    complete: frozenset[str]
    life: str = ""
    folder: int = 0

    def jobs_of(self, unit: str) -> list[ChainJob]:
        """Returns the jobs of a unit, without its gates."""
        return [job for job in self.jobs if job.unit == unit and job.kind != GATE]

    def gates_of(self, unit: str) -> list[ChainJob]:
        """Returns the gates that run after a unit's jobs."""
        return [job for job in self.jobs if job.unit == unit and job.kind == GATE]


def state_folder(folder: str | Path) -> Path:
    """Returns the absolute path of FOLDER/chain."""
    return (Path(folder) / STATE).absolute()


def is_chain(folder: str | Path) -> bool:
    """Whether a folder holds a chain that was submitted."""
    return is_a_file(state_folder(folder) / PLAN)


def refuse_chain(word: str, *, hint: str = "") -> None:
    """Raises UserError if `word` is the folder of a chain instead of a run. The message says why the chain gave up, if
    it did. `hint`: more advice for the message."""
    if not is_chain(word):
        return
    why, path = "", state_folder(word) / GAVE_UP
    with suppress(OSError, InvalidDataError):
        said = read_local_file(path, most_bytes=_MOST_MESSAGE).decode(errors="replace")
        why = f"; it gave up: {' '.join(said.split())}"
    shown = shlex.quote(word)
    raise UserError(f"{word!r} is a chain: name one of its runs, as `patchline status {shown}` lists them{hint}{why}")


def chain_name(folder: str) -> str:
    """Returns the name of a chain, which is in the comment of each of its jobs. Symbolic links to the folder give the
    same name, but other mounts of it do not."""
    return f"patchline-chain-{hashlib.sha256(str(Path(folder).resolve() / STATE).encode()).hexdigest()[:16]}"


def read_plan_of(state: Path) -> ChainPlan:
    """Reads the frozen chain. Raises UserError if there is none."""
    try:
        path = state / PLAN
        return read_record(ChainPlan, patiently(path, lambda: read_local_file(path, most_bytes=_MOST_BYTES)))
    except OSError as error:
        raise UserError(f"{state} has no chain ({error.strerror})", todo="give the folder of one") from error
    except ValueError as error:
        raise InvalidDataError(f"{state / PLAN} is damaged: {error}; submit the chain in a new folder") from error


def plan_text(state: Path) -> str:
    """Returns the frozen chain as `plan_json` made it; empty if there is none. Raises InvalidDataError if there is
    something else instead."""
    path = state / PLAN
    try:
        return patiently(path, lambda: read_local_file(path, most_bytes=_MOST_BYTES)).decode(errors="replace")
    except FileNotFoundError:
        return ""


def plan_json(plan: ChainPlan) -> str:
    """Returns the plan as the JSON text for plan.json."""
    return json.dumps(asdict(plan), indent=1) + "\n"


def read_record_of(state: Path) -> Record:
    """Reads the record since the chain last began. Lines that a crash has cut off or damaged are skipped."""
    epoch, life, folder, jobs, complete = 0, "", 0, list[ChainJob](), set[str]()
    path = state / RECORD
    data = b""
    if is_there(path):
        data = patiently(path, lambda: read_local_file(path, most_bytes=_MOST_BYTES))
    for line in data.split(b"\n"):
        if (found := object_in(line)) is None:
            continue
        if "began" in found:
            epoch, life, folder = epoch + 1, str(found.get("life", "")), found.get("folder", 0)
            jobs.clear()
            complete.clear()
        elif "complete" in found:
            complete.add(str(found["complete"]))
        else:
            found.pop("unix_time", None)
            with suppress(ValueError):
                jobs.append(read_record(ChainJob, json.dumps(found)))
    return Record(epoch=epoch, jobs=tuple(jobs), complete=frozenset(complete), life=life, folder=folder)


def begin(state: Path) -> None:
    """Begins the chain, or begins it again: jobs and completed units from before no longer count."""
    add_line(state, began=True, life=f"life-{secrets.token_hex(4)}", folder=patiently(state, state.stat).st_ino)


def jobs_begun_here(state: Path) -> list[RecordedJob]:
    """Returns the jobs that the chain has submitted since it last began, whatever path to the folder was used. The
    `life` token in a job's comment tells it from any other. Returns an empty list for a copy of the folder."""
    if not is_a_folder(state):
        return []
    record = read_record_of(state)
    is_here = record.folder == patiently(state, state.stat).st_ino
    return [RecordedJob(job=str(job.job), name=record.life) for job in record.jobs if job.job > 0] if is_here else []


def add_line(state: Path, **values: object) -> None:
    """Adds a line to the record, with the time. A line cut off by a crash is kept as a separate line."""
    append_line(state / RECORD, values | {"unix_time": round(time.time(), 3)})


def add_job(state: Path, job: ChainJob) -> None:
    """Adds a submitted job to the record."""
    add_line(state, **asdict(job))


def ending(state: Path) -> str:
    """Returns how the chain ended: gave-up, cancelled or done, or an empty string if it has not ended."""
    return next((name for name in (CANCELLED, GAVE_UP, DONE) if is_there(state / name)), "")


@dataclass(frozen=True, kw_only=True)
class ChainTask:
    """A chain's job for one run. `job`: Slurm's name for it, `12`, or `12_3` in an array. `log`: its log, once the job
    has started. `life`: the token in its comment that tells it from jobs of an earlier chain."""

    job: str
    log: Path
    life: str = ""

    @property
    def recorded(self) -> RecordedJob:
        """The job, as the queue knows it."""
        return RecordedJob(job=self.job, name=self.life)


def chain_tasks(run_dir: Path, logs: Iterable[Path] = ()) -> list[ChainTask]:
    """Returns the jobs that a chain has submitted for a run since the chain last began, newest first. Returns an empty
    list if no chain started the run, or if the chain's files are damaged or closed to this user. `logs`: known logs of
    the run. Their paths may lead to a chain whose folder does not contain the run. Raises UserError if the storage
    fails for two minutes."""
    place = Path(os.path.realpath(run_dir))
    of_logs = [log.parents[2] for log in logs if log.parts[-3:-1] == (STATE, "jobs")]
    for folder in dict.fromkeys((*place.parents[:_LEVELS], *of_logs)):
        try:
            found = list(_tasks(folder, place)) if is_chain(folder) else []
        except (OSError, UserError, ValueError) as error:  # a chain with a damaged file is skipped
            fault = error if isinstance(error, OSError) else error.__cause__
            if isinstance(fault, OSError) and fault.errno in PASSING_FAULTS:
                what = f"{str(state_folder(folder))!r} cannot be read ({fault.strerror}), so its jobs are not known"
                raise UserError(what, todo="try again once the storage answers") from error
            continue
        if found:
            return found[::-1]  # the record is in the order of submission
    return []


def _tasks(folder: Path, place: Path) -> Iterator[ChainTask]:
    state = state_folder(folder)
    plan, record = read_plan_of(state), read_record_of(state)
    for unit in plan.units:
        for number, run_dir in enumerate(unit.run_dirs()):
            if run_dir and is_same_place(Path(plan.chdir) / run_dir, place):
                for job in _jobs_of_task(unit, number, record):
                    log = state / "jobs" / f"{plan.job_name(unit)}-{job}.out"
                    yield ChainTask(job=job, log=log, life=record.life)


def is_same_place(one: Path, other: Path) -> bool:
    """Whether two paths lead to the same folder, even through links or two mounts of it. The folder need not exist
    yet."""
    one, other = (Path(os.path.realpath(each)) for each in (one, other))
    while one != other:
        with suppress(OSError):
            return one.samefile(other)
        if one.name != other.name:
            return False
        one, other = one.parent, other.parent
    return True


def _jobs_of_task(unit: Unit, number: int, record: Record) -> list[str]:
    """Returns Slurm's names for the jobs of one task of a unit."""
    jobs = [job for job in record.jobs_of(unit.name) if job.job > 0]
    if unit.num_tasks == 1:
        return [str(job.job) for job in jobs]
    return [f"{job.job}_{number - job.offset}" for job in jobs if number in job.tasks]
