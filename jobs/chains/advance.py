"""Advances a chain: finds out what is complete and what is in the queue, and submits what comes next.

`patchline submit` calls `advance`, and so does each unit's gate, a small job that starts once the unit's jobs have
ended. `advance` looks at the store, the markers and the queue, and submits only what is missing, so calling it again
submits nothing twice.
"""

import logging
import re
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jobs import exit_codes
from jobs.chains.done import failed_alone, hopeless, idle_rounds, marks_of, missing_tasks, saved_steps
from jobs.chains.state import (
    DONE,
    GATE,
    GAVE_UP,
    ChainJob,
    ChainPlan,
    Record,
    add_job,
    add_line,
    ending,
    read_plan_of,
    read_record_of,
    state_folder,
)
from jobs.chains.steps import Unit, resolved, sweep_of
from jobs.cluster.batch_script import Piece, Request, batch_script, pieces_of, stage_body, write_script
from jobs.cluster.folder_lock import alone
from jobs.cluster.recorded_jobs import submitted_in
from jobs.cluster.settings import ClusterConfig, read_cluster
from jobs.cluster.slurm import QueuedJob, most_array_tasks, queued, silence, submitted, with_variables
from jobs.output import make_folder, work_in
from jobs.submittable import SUBMIT_FOLDER, SUBMITTED, Override
from jobs.train.sweep import write
from shards.errors import TransientError, UnreachableError, UserError, WillNotSucceedError, disk_fault
from shards.files.local_files import write_whole
from shards.output.quantities import plural

_MOST_RUNS = 24  # runs in one array: their names are in its comment, and Slurm allows 1,023 characters
log = logging.getLogger(__name__)
PATIENCE_SECONDS = 600.0  # how long a gate waits for Slurm or the storage
_PAUSE_SECONDS = 10.0
_GATE_MARGIN = 30  # seconds; the cluster's margin may exceed a gate's short time limit
_REFUSALS = 3  # a gate gives up after this many refusals by a Slurm that answers


@dataclass(frozen=True, kw_only=True)
class Chain:
    """A frozen chain. `environ`: the environment of Slurm's programs. `me`: the number of the gate's own job, or 0
    outside a gate."""

    state: Path
    plan: ChainPlan
    cluster: ClusterConfig
    environ: Mapping[str, str]
    override: Override
    me: int = 0

    def own(self, queue: Sequence[QueuedJob]) -> list[QueuedJob]:
        """Returns the jobs in `queue` that belong to the chain."""
        return [one for one in queue if one.part_of(self.plan.name)]

    def jobs_of(self, unit: Unit, queue: Sequence[QueuedJob]) -> list[QueuedJob]:
        """Returns a unit's jobs in the queue, and other jobs that write to one of its runs: those submitted without the
        chain, by an earlier chain, or through another path to the folder."""
        mine = re.compile(rf"{re.escape(unit.name)}\.e[0-9]+\.r")
        own = [one for one in self.own(queue) if mine.match(one.tag)]
        others = [one for one in queue if one not in own]
        there = [
            recorded
            for run_dir in filter(None, unit.run_dirs())
            for recorded in submitted_in(Path(self.plan.chdir) / run_dir / SUBMIT_FOLDER)
        ]
        return own + [
            one
            for one in others
            if any(map(one.part_of, filter(None, unit.names)))
            or any(one.part_as(recorded, self.environ) for recorded in there)
        ]


def open_chain(state: Path, *, environ: Mapping[str, str], override: Override, me: int = 0) -> Chain:
    """Reads the frozen chain in a folder."""
    plan = read_plan_of(state)
    environ = dict(environ)
    cluster = replace(with_variables(read_cluster(state / "cluster.yaml"), environ), command=plan.command)
    return Chain(state=state, plan=plan, cluster=cluster, environ=environ, override=override, me=me)


def gate(words: list[str], *, override: Override, environ: Mapping[str, str]) -> int:
    """Runs `patchline __gate FOLDER UNIT`, in a job that follows the unit's jobs. Returns 0; 78 if the chain gave up or
    was cancelled; or 74 if Slurm or the storage did not answer for ten minutes."""
    if len(words) != 2:
        raise UserError(f"__gate takes the folder of a chain and a unit; {plural(len(words), 'word')} were given")
    number = environ.get("SLURM_JOB_ID", "")
    me = int(number) if number.isdecimal() else 0
    work_in(Path(words[0]))
    chain = open_chain(state_folder(words[0]), environ=environ, override=override, me=me)
    deadline, refusals, refusal = time.monotonic() + PATIENCE_SECONDS, 0, Exception()
    while True:
        try:
            if refusals >= _REFUSALS:
                return give_up(chain, str(refusal))
            return advance(chain)
        except (UserError, TransientError, OSError) as error:
            is_storage = isinstance(error, UnreachableError | TransientError) or disk_fault(error) is not None
            if isinstance(error, OSError) and not is_storage:
                raise
            if not is_storage and not silence(environ):
                refusals, refusal = refusals + 1, error
            log.warning("%s; asking again", error)
        if time.monotonic() > deadline:
            log.error("Slurm or the storage has not answered for %.0f s", PATIENCE_SECONDS)
            return exit_codes.CRASH
        time.sleep(_PAUSE_SECONDS)


def advance(chain: Chain) -> int:
    """Submits what can be submitted now. Returns 0, or 78 if the chain was cancelled or gave up. FOLDER/chain/gave-up
    says why it gave up."""
    with alone(chain.state):
        if how := ending(chain.state):
            log.info("the chain is %s: nothing is submitted; see %s", how, chain.state)
            return exit_codes.DONE if how == DONE else exit_codes.WILL_NOT_SUCCEED
        try:
            complete = _advance_units(chain)
        except WillNotSucceedError as error:
            return give_up(chain, str(error))
        if complete == {unit.name for unit in chain.plan.units}:
            (chain.state / DONE).touch()
            log.info("all of the chain is done: %s", chain.state.parent)
    return exit_codes.DONE


def give_up(chain: Chain, message: str) -> int:
    """Ends the chain, so that nothing more is submitted, and returns 78."""
    if not ending(chain.state):
        write_whole(chain.state / GAVE_UP, f"{message}\n".encode())
    log.error("the chain ends here: %s", message)
    return exit_codes.WILL_NOT_SUCCEED


def _advance_units(chain: Chain) -> set[str]:
    record, queue = read_record_of(chain.state), queued(chain.environ)
    complete = set(record.complete)
    for unit in chain.plan.units:
        if unit.name in complete or not complete.issuperset(unit.after):
            continue
        if waiting := chain.jobs_of(unit, queue):
            _ensure_gate(chain, unit, record, queue, behind=waiting)
            continue
        ready = resolved(unit, chain.override)
        failed = failed_alone(unit, record.jobs_of(unit.name))
        missing = missing_tasks(ready, state=chain.state, override=chain.override)
        missing = [task for task in missing if task not in failed]
        if not missing:
            _complete(chain, ready)
            complete.add(unit.name)
            continue
        _submit_again(chain, ready, missing, record)
    return complete


def _complete(chain: Chain, unit: Unit) -> None:
    if unit.best_of:
        write(sweep_of(unit.best_of), chain.override)
    add_line(chain.state, complete=unit.name)
    log.info("%s is complete", unit.name)


def _submit_again(chain: Chain, unit: Unit, missing: list[int], record: Record) -> None:
    """Submits jobs for the missing tasks. Raises WillNotSucceedError if the jobs would end the same way again, or if
    too many rounds in a row made no progress."""
    mine = record.jobs_of(unit.name)
    number = max((job.round for job in mine), default=-1) + 1
    last = [job for job in mine if job.round == number - 1]
    if reason := hopeless(unit, last, state=chain.state):
        raise WillNotSucceedError(reason)
    idle = idle_rounds(mine, missing, saved_steps(unit))
    if idle > chain.plan.rounds:
        what = "it" if unit.num_tasks == 1 else f"{plural(len(missing), 'task')} of it"
        raise WillNotSucceedError(
            f"{unit.name} is not complete: {what} was submitted {plural(idle, 'time')} in a row without anything new; "
            f"see the logs in {chain.state / 'jobs'}, and submit the chain again to continue"
        )
    if number:
        log.info("%s: %s of %s missing, submitted again", unit.name, len(missing), unit.num_tasks)
    ids = submit_unit(chain, unit, missing, number=number, epoch=record.epoch)
    _submit_gate(chain, unit, ids, number=number, epoch=record.epoch)


def submit_unit(chain: Chain, unit: Unit, tasks: list[int], *, number: int, epoch: int) -> list[int]:
    """Submits the jobs for these tasks of a unit, except jobs that Slurm already has. Returns the numbers of all these
    jobs."""
    tag = f"{unit.name}.e{epoch}.r{number}"
    most = most_array_tasks(chain.environ) if unit.num_tasks > 1 else 1
    wanted = requests_of(chain, unit, tasks, tag=tag, most=most)
    ids: list[int] = []
    for request, piece in wanted:
        if piece.waits_for is not None and piece.array:
            request = replace(request, dependency=f"afterany:{ids[piece.waits_for]}")  # noqa: PLW2901
        job = ChainJob(
            unit=unit.name,
            kind="job",
            round=number,
            tag=tag,
            job=0,
            tasks=piece.tasks,
            marks=marks_of(unit),
            steps=saved_steps(unit),
            offset=piece.offset,
        )
        ids.append(_submitted(chain, request, job))
    return ids


def _submit_gate(chain: Chain, unit: Unit, after: list[int], *, number: int, epoch: int, again: str = "") -> None:
    """Submits a gate. On a cluster that does not requeue lost jobs, a second gate runs after the first, in case the
    first is lost with its node."""
    tag = f"{GATE}.{unit.name}.e{epoch}.r{number}{again}"
    for each in (tag,) if chain.cluster.requeue else (tag, f"{tag}.second"):
        request = gate_request(chain, unit, tag=each, after=after)
        after = [_submitted(chain, request, ChainJob(unit=unit.name, kind=GATE, round=number, tag=each, job=0))]


def _ensure_gate(
    chain: Chain, unit: Unit, record: Record, queue: list[QueuedJob], *, behind: Sequence[QueuedJob]
) -> None:
    """Submits a gate that runs after the unit's jobs in the queue, unless another gate is pending or running. A gate
    may start while these jobs are about to be requeued, because Slurm then regards its dependency as met."""
    gates = record.gates_of(unit.name)
    is_gate = re.compile(rf"{GATE}\.{re.escape(unit.name)}\.e[0-9]+\.r")
    if any(one.number != chain.me for one in chain.own(queue) if is_gate.match(one.tag)):
        return
    number = max((job.round for job in (*record.jobs_of(unit.name), *gates)), default=0)
    ids = list(dict.fromkeys(one.number for one in behind))
    _submit_gate(chain, unit, ids, number=number, epoch=record.epoch, again=f".g{len(gates)}")


def gate_request(chain: Chain, unit: Unit, *, tag: str, after: Sequence[int]) -> Request:
    """Returns the request for a gate, which advances the chain once all jobs in `after` have ended, whether they
    succeeded or not."""
    return Request(
        words=("__gate", str(chain.state.parent), unit.name),
        name=f"{GATE}-{unit.name}",
        comment=f"-,{chain.plan.name},{tag}",
        nodes=1,
        time_limit=str(chain.plan.gate_minutes),
        folder=chain.state / "jobs",
        chdir=Path(chain.plan.chdir),
        has_ranks=False,
        cpus=1,
        dependency="afterany:" + ":".join(map(str, after)) if after else "",
        state=str(chain.state / "jobs" / tag),
    )


def requests_of(chain: Chain, unit: Unit, tasks: Sequence[int], *, tag: str, most: int) -> list[tuple[Request, Piece]]:
    """Returns the jobs for these tasks of a unit: one job, several that continue each other, or an array in pieces.
    `most`: how many tasks Slurm allows in one array."""
    pieces = pieces_of(tasks, most=min(most, _MOST_RUNS) if any(unit.names) else most, at_once=unit.at_once)
    if unit.num_tasks == 1:
        pieces = [replace(pieces[0], array="")] * unit.links
    common = Request(
        words=unit.words[0],
        name=chain.plan.job_name(unit),
        comment="",
        nodes=unit.nodes,
        time_limit=unit.time,
        folder=chain.state / "jobs",
        chdir=Path(chain.plan.chdir),
        has_ranks=SUBMITTED[unit.stage].has_ranks,
        cpus=unit.cpus,
        dependency="singleton" if unit.links > 1 else "",
        state=str(chain.state / "jobs" / tag),
    )
    found = []
    for number, piece in enumerate(pieces):
        comment = ",".join([*_runs_in(unit, piece), chain.plan.name, f"{tag}.p{number}"])
        found.append((replace(common, comment=comment, array=piece.array, tail=tuple(_tail(unit, piece))), piece))
    return found


def _runs_in(unit: Unit, piece: Piece) -> list[str]:
    """Returns the names of the runs in a job, each with its index if the job is an array; only `-` if the unit has no
    runs."""
    if not any(unit.names):
        return ["-"]
    return [f"{unit.names[task]}@{task - piece.offset}" if piece.array else unit.names[task] for task in piece.tasks]


def _tail(unit: Unit, piece: Piece) -> list[str]:
    """Returns lines of shell that choose the arguments of the array's task."""
    if not piece.array:
        return []
    lines = [f"patchline_task=$(({piece.offset} + SLURM_ARRAY_TASK_ID))"]
    if unit.num_parts > 1:
        return [*lines, f'set -- "$@" "--part=$patchline_task/{unit.num_parts}"']
    cases = [f"    {task}) set -- {shlex.join(unit.words[task])} ;;" for task in piece.tasks]
    return [*lines, "case $patchline_task in", *cases, "    *) exit 2 ;;", "esac"]


def _submitted(chain: Chain, request: Request, job: ChainJob) -> int:
    """Submits a job, unless it was submitted just before a crash, and returns its number. Raises WillNotSucceedError if
    the chain has ended in the meantime."""
    tag, record = request.comment.rpartition(",")[2], read_record_of(chain.state)
    own = chain.own(queued(chain.environ, with_ended=True))
    there = [one for one in own if one.tag == tag and (not record.life or record.life in one.names)]
    if there:
        number = there[0].number
    else:
        if how := ending(chain.state):
            raise WillNotSucceedError(f"the chain is {how}")
        path = chain.state / "jobs" / f"{tag}.sbatch"
        make_folder(path.parent)
        comment = f"{record.life},{request.comment}" if record.life else request.comment
        write_script(path, script_of(chain, replace(request, comment=comment)))
        number = submitted([str(path)], chain.environ, inherited=chain.cluster.environment)
        log.info("job %s: %s", number, tag)
    if all((one.job, one.tag) != (number, job.tag) for one in record.jobs):  # Slurm may use a number again
        add_job(chain.state, replace(job, job=number))
    return number


def script_of(chain: Chain, request: Request) -> str:
    """Returns the batch script of one of the chain's jobs."""
    cluster = replace(chain.cluster, margin_seconds=_GATE_MARGIN) if request.words[0] == "__gate" else chain.cluster
    return batch_script(request, cluster, body=stage_body())
