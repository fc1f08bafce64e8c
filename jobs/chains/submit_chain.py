"""`patchline submit CHAIN.yaml`: freezes a chain in its folder and submits its first jobs, or shows the whole chain."""

import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from jobs import exit_codes
from jobs.arguments import value_in
from jobs.chains.advance import Chain, advance, gate_request, requests_of, script_of
from jobs.chains.done import STOPPED_BY_HAND, refuse_changed
from jobs.chains.state import (
    CANCELLED,
    DONE,
    GAVE_UP,
    PLAN,
    ChainPlan,
    begin,
    chain_name,
    ending,
    jobs_begun_here,
    plan_json,
    plan_text,
    state_folder,
)
from jobs.chains.steps import ChainConfig, Unit, units_of
from jobs.cluster.batch_script import Request, head_lines, most_hours, script_summary, size_of
from jobs.cluster.folder_lock import alone
from jobs.cluster.secret_names import refuse_secret_words
from jobs.cluster.settings import ClusterConfig, Names
from jobs.cluster.slurm import most_array_tasks, need_sbatch, settled_with, silence, slurms_answer
from jobs.cluster.submit_checks import (
    AskedJob,
    gate_minutes,
    limits_of,
    refuse_job,
    refuse_unprintable,
    refuse_unreachable,
)
from jobs.output import make_folder, put, work_in
from jobs.submittable import SUBMITTED, Override, job_of_words
from shards.errors import UserError
from shards.files.local_files import write_whole
from shards.output.quantities import plural
from shards.output.terminal import printable_name

log = logging.getLogger(__name__)
_NUMBERS = (3, 4, 5, 6)  # columns of the graph that are aligned to the right
_MOST_ASKED = 20  # how many jobs a dry run asks Slurm about
UnitJob = tuple[Unit, tuple[str, ...], Any]  # a unit, the arguments of one of its runs, and the job that they describe


def submit_chain(
    config: ChainConfig,
    cluster: ClusterConfig,
    *,
    copies: Mapping[str, str],
    is_dry: bool,
    is_full: bool,
    has_checks: bool,
    names: Names,
    override: Override,
    environ: Mapping[str, str],
) -> int:
    """Submits or shows a chain, and returns the exit code. `copies`: texts to keep beside the chain, by name.
    `is_full`: whether a dry run shows whole scripts. `names`: what messages call the settings of a step. Raises
    UserError for what a stage or Slurm would refuse. With `has_checks`, also raises it if a check of a job fails or,
    unless `is_dry`, if a store cannot be reached."""
    silent = silence(environ) if is_dry else ""
    if silent:
        environ = {**environ, "PATH": ""}  # no Slurm program is called from here on
    units = units_of(config)
    jobs = [(unit, words, _job_of(unit, words, override)) for unit in units for words in unit.words]
    refuse_unprintable(config.folder, what="folder")
    for _, words, _ in jobs:
        refuse_unprintable(value_in(words, "--run-dir"))
    if has_checks:
        refuse_unreachable([word for _, words, _ in jobs for word in words], cluster, is_dry=is_dry)
        _check_all(jobs, cluster, environ, names=names, folder=str(Path(config.folder).resolve()))
    plan = ChainPlan(
        name=chain_name(config.folder),
        units=units,
        rounds=config.rounds,
        chdir=str(Path.cwd()),
        command=cluster.command,
        gate_minutes=gate_minutes(limits_of(cluster.partition_for(has_ranks=False), environ)),
    )
    work_in(Path(config.folder))
    state = state_folder(Path(config.folder).resolve())
    chain = Chain(state=state, plan=plan, cluster=cluster, environ=environ, override=override)
    if is_dry:
        return _show(chain, is_full=is_full, silent=silent, names=names)
    need_sbatch(environ)
    for unit, words, job in jobs:  # before the frozen chain is replaced
        if not unit.best_of:  # the best values of a sweep are known only after its tries
            with _named(unit):
                refuse_changed(unit.stage, words, job)
    for request in _first_requests(chain):
        text = script_of(chain, replace(request, dependency=""))
        slurms_answer([], environ, text=text, what=f"the job {printable_name(request.name)}", names=names)
    _make_folder(chain.state)
    with alone(chain.state):
        if not _begin(chain, copies):
            return exit_codes.DONE
    return _advance(chain)


@contextmanager
def _named(unit: Unit) -> Iterator[None]:
    """Puts the name of the unit's step in front of error messages."""
    try:
        yield
    except UserError as error:
        raise UserError(f"step {unit.step}: {error}") from error


def _job_of(unit: Unit, words: tuple[str, ...], override: Override) -> Any:
    with _named(unit):
        refuse_secret_words(words)  # secrets are refused before a message can quote them
        job = job_of_words(list(words), override)
        if unit.best_of and not job.evaluation.url:
            raise UserError("--evaluation.url is missing: the dataset on which the best of the sweep are scored")
        return job


def _check_all(
    jobs: Sequence[UnitJob], cluster: ClusterConfig, environ: Mapping[str, str], *, names: Names, folder: str
) -> None:
    limits = {each: limits_of(cluster.partition_for(has_ranks=each), environ) for each in (True, False)}
    for unit, words, job in jobs:
        has_ranks = SUBMITTED[unit.stage].has_ranks
        asked = AskedJob(job=job, words=(*words, folder), nodes=unit.nodes, time_limit=unit.time, has_ranks=has_ranks)
        with _named(unit):
            refuse_job(asked, cluster, limits[has_ranks], environ, names=names)


def _make_folder(state: Path) -> None:
    try:
        make_folder(state.parent)
        make_folder(state)
        (state / "lock").touch()
    except OSError as error:
        raise UserError(
            f"cannot write to {state}: {error.strerror}", todo="give a folder that you may write to"
        ) from error


def _begin(chain: Chain, copies: Mapping[str, str]) -> bool:
    """Freezes the chain and begins it. If the chain's jobs are in the queue, says so and returns False instead; raises
    UserError if they belong to another or a cancelled chain. A chain that gave up begins again even if some of its jobs
    are still running."""
    state, text, how = chain.state, plan_json(chain.plan), ending(chain.state)
    frozen = plan_text(state)
    waiting = settled_with(chain.plan.name, chain.environ, recorded=jobs_begun_here(state))
    shown = ", ".join(f"{one.job} {one.state}" for one in waiting[:10])
    if waiting and frozen != text:
        raise UserError(
            f"another chain of {state.parent}, or this one by another path, has jobs ({shown}); cancel it with "
            f"`patchline cancel {state.parent}`, or give another folder"
        )
    if waiting and how == CANCELLED:
        raise UserError(
            f"the chain was cancelled and still has jobs ({shown}); `patchline cancel {state.parent}` ends them"
        )
    if waiting and how != GAVE_UP:
        log.info("the chain has jobs already: %s; nothing was submitted", shown)
        return False
    for name, content in {**copies, PLAN: text}.items():
        write_whole(state / name, content.encode())
    for name in (CANCELLED, GAVE_UP, DONE):
        (state / name).unlink(missing_ok=True)
    for run_dir in (Path(one) for unit in chain.plan.units for one in unit.run_dirs() if one):
        for name in (STOPPED_BY_HAND, GAVE_UP):
            (run_dir / "submit" / name).unlink(missing_ok=True)
    begin(state)
    return True


def _advance(chain: Chain) -> int:
    try:
        return advance(chain)
    except (UserError, OSError) as error:  # perhaps no gate is in the queue to try again
        (chain.state / GAVE_UP).touch()  # an empty file can be made even if the disk is full
        with suppress(OSError):
            write_whole(chain.state / GAVE_UP, f"{error}\n".encode())
        raise


def _first_requests(chain: Chain) -> list[Request]:
    """Returns the jobs of every unit, each unit followed by its gate. If nothing fails, the chain submits no other
    jobs, except each unit's second gate on a cluster that does not requeue."""
    requests = []
    most = most_array_tasks(chain.environ) if shutil.which("scontrol", path=chain.environ.get("PATH")) else 1001
    for unit in chain.plan.units:
        tag = f"{unit.name}.e1.r0"
        pieces = requests_of(chain, unit, range(unit.num_tasks), tag=tag, most=most)
        requests += [request for request, _ in pieces]
        requests.append(gate_request(chain, unit, tag=f"gate.{tag}", after=[]))
    return requests


def graph_of(units: tuple[Unit, ...], cluster: ClusterConfig, *, folder: str) -> str:
    """Returns a table of what a chain does. It has each unit below the last one that it waits for, with its jobs, their
    size, and the GPU-hours of all of them if each runs up to its time limit."""
    head = ("step", "stage", "jobs", "nodes each", "GPUs each", "time limit", "most GPU-hours", "")
    rows, num_jobs, total = [head], 0, 0.0
    for unit, place in _placed(units):
        has_ranks = SUBMITTED[unit.stage].has_ranks
        one = size_of(cluster, nodes=unit.nodes, time_limit=unit.time, has_ranks=has_ranks)
        number = unit.num_tasks * unit.links
        hours = None if one.gpu_hours is None else number * one.gpu_hours
        num_jobs, total = num_jobs + number, total + (hours or 0)
        jobs = f"{number}, {unit.at_once} at once" if unit.at_once and number > 1 else f"{number}"
        jobs += ", in a row" if unit.links > 1 else ""
        others = sorted(_needed(unit, units), key=[each.name for each in units].index)[:-1]
        more = [f"also after {' and '.join(others)}"] if others else []
        more += ["with the best values instead of the first"] if unit.best_of else []
        gpus = f"{one.gpus:,}" if one.gpus else "-"
        cost = most_hours(hours) if hours else "-"
        rows.append(
            (place + unit.name, unit.stage, jobs, f"{one.nodes:,}", gpus, one.time_limit or "-", cost, "; ".join(more))
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = [
        "  ".join(
            cell.rjust(width) if column in _NUMBERS else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    about = f"chain in {folder}: {plural(len(units), 'step')}, {plural(num_jobs, 'job')}"
    about += f", at most {most_hours(total)} GPU-hours" if total else ""
    return "".join(f"{printable_name(line.rstrip())}\n" for line in (about, "", *lines))


def _needed(unit: Unit, units: tuple[Unit, ...]) -> set[str]:
    """Returns the units that a unit waits for directly, without those that another of them waits for."""
    before = {each.name: set(each.after) for each in units}
    for each in units:  # earlier units come first, so their sets are complete
        before[each.name] |= {name for other in each.after for name in before[other]}
    return {name for name in unit.after if not any(name in before[other] for other in unit.after)}


def _placed(units: tuple[Unit, ...], parent: str = "", indent: str = "") -> Iterator[tuple[Unit, str]]:
    """Yields each unit below the last one that it waits for, with the lines to draw before its name."""
    order = [each.name for each in units]
    last = {unit.name: max(_needed(unit, units), key=order.index, default="") for unit in units}
    own = [unit for unit in units if last[unit.name] == parent]
    for unit in own:
        is_last = unit is own[-1]
        yield unit, (indent + ("└─ " if is_last else "├─ ")) if parent else ""
        yield from _placed(units, unit.name, indent + ("   " if is_last else "│  ") if parent else "")


def _show(chain: Chain, *, is_full: bool, silent: str, names: Names) -> int:
    """Prints the graph, the head of each job (or its whole script, if `is_full`), and Slurm's answer, or why Slurm was
    not asked (`silent`). Writes no files."""
    requests = _first_requests(chain)
    put(f"{graph_of(chain.plan.units, chain.cluster, folder=str(chain.state.parent))}\n")
    if is_full:
        for request in requests:
            put(f"# ===== {request.name}\n{script_of(chain, request)}\n")
    else:
        _show_heads([request for request in requests if request.words[:1] != ("__gate",)], chain.cluster)
    if silent:
        log.warning("%s: Slurm was not asked about these jobs and their limits", silent)
        return exit_codes.DONE
    for request in requests[:_MOST_ASKED]:
        name, text = printable_name(request.name), script_of(chain, replace(request, dependency=""))
        log.info("%s: %s", name, slurms_answer([], chain.environ, text=text, what=f"the job {name}", names=names))
    return exit_codes.DONE


def _show_heads(requests: Sequence[Request], cluster: ClusterConfig) -> None:
    """Prints the #SBATCH lines that all jobs share, then each job with its other lines."""
    heads = [head_lines(request, cluster) for request in requests]
    common = [line for line in heads[0] if all(line in head for head in heads)] if len(heads) > 1 else []
    if common:
        put("".join(f"{printable_name(line)}\n" for line in ("all jobs", *(f"  {line}" for line in common), "")))
    for request in requests:
        put(f"{script_summary(request, cluster, besides=common)}\n")
    put("behind each job, a gate of one core submits what follows; whole scripts: add --full\n")
