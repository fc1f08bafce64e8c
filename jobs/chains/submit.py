"""`patchline submit STAGE RECIPE --cluster FILE [--nodes N] [...]`: writes the batch script of a job, and submits it.

First, the arguments are checked as the stage would check them, and the script by `sbatch --test-only`. If the run is
done, or has a job in the queue, nothing is submitted. torch is loaded only to read the DONE of a run, and to plan the
saves of training on GPUs.
"""

import json
import logging
import time
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from jobs import exit_codes
from jobs.arguments import SHARED, take_own_flags, value_in
from jobs.chains.done import STOPPED_BY_HAND, is_trained, refuse_stopped
from jobs.chains.state import GAVE_UP, chain_tasks
from jobs.chains.steps import ChainConfig, StepConfig, read_chain
from jobs.chains.submit_chain import submit_chain
from jobs.cluster.batch_script import Request, batch_script, names_of, script_summary, stage_body, write_script
from jobs.cluster.folder_lock import alone
from jobs.cluster.recorded_jobs import SUBMISSIONS, RecordedJob, submitted_in
from jobs.cluster.secret_names import refuse_secret_words, withheld
from jobs.cluster.settings import (
    ClusterConfig,
    Names,
    read_cluster,
    refuse_wrong_limit,
    with_command,
)
from jobs.cluster.slurm import (
    QueuedJob,
    job_facts,
    need_sbatch,
    queued_with,
    settled_with,
    silence,
    slurms_answer,
    submitted,
    with_variables,
)
from jobs.cluster.submit_checks import AskedJob, limits_of, refuse_job, refuse_unprintable, refuse_unreachable
from jobs.output import make_folder, put, work_in
from jobs.record import MOST_BYTES
from jobs.settings import NumLinks, NumNodes
from jobs.stages import TOOLS, WITH_SMOKE
from jobs.submittable import SUBMIT_FOLDER, Override, job_of_words, submit_folder, submitted_stage, work_name
from pipeline.training.settings.job import TrainingJob
from shards.config_values import Range
from shards.errors import UserError
from shards.files.local_files import append_or_say, read_local_text
from shards.files.looks import is_there, patiently
from shards.output.terminal import printable_name

_IDENTITY_SECONDS = 10.0
_MOST_NAMES = 3  # how many of the variables that jobs do not get are named in the log

log = logging.getLogger(__name__)
USAGE = (
    "patchline submit STAGE RECIPE --cluster FILE [--nodes N] [--time LIMIT] [--links K] [--spares K] "
    "[--dry-run [--full]] [--no-check] [--any.field VALUE ...]"
)


@dataclass(frozen=True, kw_only=True)
class SubmitFlags:
    """The flags of `patchline submit` itself. None keeps the value of the cluster's settings."""

    cluster: str = ""
    nodes: NumNodes = StepConfig.nodes
    time: str | None = None
    links: NumLinks = StepConfig.links
    spares: Annotated[int, Range(0, 1024)] | None = None
    dry_run: bool = False
    full: bool = False
    no_check: bool = False

    def __post_init__(self) -> None:
        if self.time is not None:
            refuse_wrong_limit(self.time, what="--time")
        if self.full and not self.dry_run:
            raise UserError("--full shows whole scripts in a dry run; add --dry-run, or leave it out")


def run(words: list[str], *, override: Override, environ: MutableMapping[str, str]) -> int:
    """Submits a job or a chain, and returns the exit code. Raises UserError for what Slurm or the stage would
    refuse."""
    flags, words = take_own_flags(SubmitFlags, words)
    if words[:1] and words[0].endswith((".yaml", ".yml")):
        _refuse_flags_of_runs(flags, words[1:])
        config = read_chain(Path(words[0]))
        return _submit_chain(
            config, read_local_text(words[0], most_bytes=MOST_BYTES), flags, override, environ, names=Names.OF_STEP
        )
    if words[:1] == ["sweep"]:
        refuse_secret_words(words)
        config = _chain_of_sweep(words[1:], flags)
        return _submit_chain(config, json.dumps(asdict(config), indent=1) + "\n", flags, override, environ)
    if len(words) < 2 or words[1].startswith("-"):
        raise UserError(f"usage: {USAGE}\n    or: patchline submit CHAIN.yaml --cluster FILE [--dry-run] [--no-check]")
    stage, row = words[0], submitted_stage(words[0])
    _refuse_wrong_numbers(flags, stage, has_ranks=row.has_ranks)
    refuse_secret_words(words)
    cluster = read_settings(flags.cluster, environ, is_full=flags.full)
    if flags.spares is not None:
        cluster = replace(cluster, spares=flags.spares)
    job = job_of_words(words, override)
    run_dir = getattr(job, "run_dir", "")
    if run_dir and not any(word.partition("=")[0] == "--run-dir" for word in words):
        words = [*words, "--run-dir", run_dir]  # it came from a file, but the script looks for it in the arguments
    refuse_unprintable(run_dir)
    if run_dir:
        work_in(Path(run_dir), is_shared=SHARED in words)
    if isinstance(job, TrainingJob) and is_trained(job, extends="--extend" in words):
        log.info("%s is done; nothing was submitted", printable_name(run_dir))
        if not flags.dry_run:
            return exit_codes.DONE
    else:
        refuse_stopped(job)
    silent = silence(environ) if flags.dry_run else ""
    if silent:
        environ = {**environ, "PATH": ""}  # no Slurm program is called from here on
    if not flags.no_check:
        refuse_unreachable(words, cluster, is_dry=flags.dry_run)
        limit = flags.time or ""
        asked = AskedJob(job=job, words=tuple(words), nodes=flags.nodes, time_limit=limit, has_ranks=row.has_ranks)
        limits = limits_of(cluster.partition_for(has_ranks=row.has_ranks), environ)
        refuse_job(asked, cluster, limits, environ)
    request = _request(words, flags, job=job, has_ranks=row.has_ranks)
    text = batch_script(request, cluster, body=stage_body())
    if flags.dry_run:
        put(text if flags.full else f"{script_summary(request, cluster)}the whole script: add --full\n")
        return _tell_test(request, text, environ, silent=silent)
    return _submit(request, text, environ, links=flags.links, inherited=cluster.environment)


def _submit_chain(
    config: ChainConfig,
    text: str,
    flags: SubmitFlags,
    override: Override,
    environ: MutableMapping[str, str],
    *,
    names: Names = Names.OF_SUBMIT,
) -> int:
    cluster = read_settings(flags.cluster, environ, is_full=flags.full)
    reach_store(cluster, environ)
    return submit_chain(
        config,
        cluster,
        copies={"chain.yaml": text, "cluster.yaml": read_local_text(flags.cluster, most_bytes=MOST_BYTES)},
        is_dry=flags.dry_run,
        is_full=flags.full,
        has_checks=not flags.no_check,
        names=names,
        override=override,
        environ=environ,
    )


def _chain_of_sweep(words: list[str], flags: SubmitFlags) -> ChainConfig:
    """Returns a sweep as a chain of one step, in the sweep's folder."""
    if len(words) < 2 or words[0] not in WITH_SMOKE or flags.links > 1:
        raise UserError(f"usage: patchline submit sweep {TOOLS['sweep'].usage} --cluster FILE [--nodes N]")
    if flags.spares is not None:
        raise UserError("a sweep takes no --spares; write `spares:` into the cluster's settings")
    if not value_in(words, "--run-dir"):
        raise UserError("--run-dir is missing: the folder of the sweep, in which each run has its own")
    step = StepConfig(
        name="sweep",
        stage=words[0],
        recipe=words[1],
        sweep=tuple(words[2:]),
        nodes=flags.nodes,
        time=flags.time or "",
    )
    return ChainConfig(folder=value_in(words, "--run-dir"), steps=(step,))


def _refuse_flags_of_runs(flags: SubmitFlags, words: Sequence[str]) -> None:
    """Raises UserError for flags that a chain does not take."""
    plain, names = asdict(SubmitFlags()), ("nodes", "links", "spares", "time")
    given = [f"--{name}" for name in names if asdict(flags)[name] != plain[name]] + [*map(printable_name, words)]
    if given:
        raise UserError(
            f"a chain takes no {given[0]}: its steps have `nodes:`, `time:`, `links:` and `flags:` of their own, and "
            "the cluster's settings `spares:`; write it there"
        )


def _request(words: list[str], flags: SubmitFlags, *, job: Any, has_ranks: bool) -> Request:
    folder = submit_folder(getattr(job, "run_dir", ""), words[0])
    comment, name = work_name(words, job), names_of(words)
    return Request(
        words=tuple(words),
        name=f"{name}-{comment[-8:]}" if flags.links > 1 else name,  # singleton: jobs of one name wait for each other
        comment=comment,
        nodes=flags.nodes,
        time_limit=flags.time or "",
        folder=folder,
        chdir=Path.cwd(),
        has_ranks=has_ranks,
        dependency="singleton" if flags.links > 1 else "",
    )


def _refuse_wrong_numbers(flags: SubmitFlags, stage: str, *, has_ranks: bool) -> None:
    if flags.nodes > 1 and not has_ranks:
        raise UserError(f"--nodes is {flags.nodes}, and {stage} runs on one; leave it out")
    if flags.spares and not has_ranks:
        raise UserError(f"--spares is {flags.spares}, and {stage} runs on one node; leave it out")
    if flags.links > 1 and stage not in WITH_SMOKE:
        raise UserError(f"--links is of {' and '.join(WITH_SMOKE)}, whose runs are continued; leave it out")


def read_settings(path: str, environ: MutableMapping[str, str], *, is_full: bool) -> ClusterConfig:
    """Reads the cluster's settings, and adds what the shell says and the command that runs patchline there. Logs the
    variables that jobs do not get: all of them if `is_full`, otherwise the first three. Raises UserError for a mistake
    in the settings."""
    if not path:
        raise UserError(
            "--cluster is missing: the YAML file of your cluster's settings; for one to edit: patchline example "
            "cluster.yaml > cluster.yaml"
        )
    cluster = read_cluster(Path(path))
    if names := withheld(environ, named=cluster.environment):
        shown = names if is_full else names[:_MOST_NAMES]
        log.info(
            "kept from jobs, since Slurm stores what they inherit: %s%s; to pass on what is no secret, name it in "
            "`environment:` of your cluster's settings",
            ", ".join(map(printable_name, shown)),
            f" and {len(names) - len(shown)} more (--dry-run --full names all)" if len(names) > len(shown) else "",
        )
    return with_command(with_variables(cluster, environ), environ)


def reach_store(cluster: ClusterConfig, environ: MutableMapping[str, str]) -> None:
    """Makes this process reach the store in the same way as the jobs will."""
    for name, value in (("AWS_ENDPOINT_URL", cluster.s3_endpoint), ("AWS_PROFILE", cluster.s3_profile)):
        if value:
            environ[name] = value


def _submit(request: Request, text: str, environ: Mapping[str, str], *, links: int, inherited: Sequence[str]) -> int:
    need_sbatch(environ)
    # Slurm is asked before the folder is made, so that a refusal leaves no folder that looks like a run.
    said = "" if is_there(request.folder) else slurms_answer([], environ, text=text)
    try:
        make_folder(request.folder.parent)
        make_folder(request.folder)
    except OSError as error:
        raise UserError(
            f"cannot make {request.folder}: {error.strerror}", todo="give a folder that you may write to"
        ) from error
    with alone(request.folder):
        if waiting := settled_with(request.comment, environ, recorded=_recorded(request)):
            log.info("%s has a job already: %s; nothing was submitted", request.name, _shown(waiting))
            return exit_codes.DONE
        for name in (STOPPED_BY_HAND, GAVE_UP):
            (request.folder / name).unlink(missing_ok=True)
        path = request.folder / f"{request.name}.sbatch"
        write_script(path, text)
        log.info("%s", said or slurms_answer([str(path)], environ))
        shown = printable_name(str(request.folder))
        for _ in range(links):  # each job is logged at once, since a later submission may fail
            job_id = submitted([str(path)], environ, inherited=inherited)
            log_path = f"{shown}/{request.name}-{job_id}.out"
            log.info("job %s: %s on %s nodes; its log: %s", job_id, request.name, request.nodes, log_path)
            _record(job_id, request, path, environ)
    return exit_codes.DONE


def _record(number: int, request: Request, script: Path, environ: Mapping[str, str]) -> None:
    """Records a submitted job, with what tells it from another job that gets its number later."""
    line: dict[str, object] = {"job": number, "name": request.comment}
    try:
        with suppress(UserError):  # Slurm has stopped answering; the job's first start records the rest
            facts = job_facts(str(number), environ, seconds=_IDENTITY_SECONDS)
            line |= {"user": facts.user, "submitted": facts.submitted} if facts else {}
    finally:
        line |= {"unix_time": round(time.time(), 3), "script": script.name, "words": request.words}
        line["folder"] = patiently(request.folder, request.folder.stat).st_ino  # the same for every path to the folder
        append_or_say(request.folder / SUBMISSIONS, line, what=f"job {number}, which is in the queue")


def _recorded(request: Request) -> list[RecordedJob]:
    """Returns the recorded jobs of the run and of its chain. A job that was submitted through another path to the
    folder has another name, so a search of the queue for one name would miss it."""
    if request.folder.name != SUBMIT_FOLDER:
        return []  # all commands of a stage share this folder
    return [*submitted_in(request.folder), *(task.recorded for task in chain_tasks(request.folder.parent))]


def _tell_test(request: Request, text: str, environ: Mapping[str, str], *, silent: str) -> int:
    """Says what Slurm would do with the script, or why Slurm was not asked (`silent`). Writes no files."""
    if silent:
        log.warning("%s: Slurm was not asked about this job, its limits and the queue", silent)
        return exit_codes.DONE
    log.info("%s", slurms_answer([], environ, text=text))
    if waiting := queued_with(request.comment, environ, recorded=_recorded(request)):
        log.info("%s has a job already: %s", request.name, _shown(waiting))
    return exit_codes.DONE


def _shown(jobs: Sequence[QueuedJob]) -> str:
    """Returns the jobs as text, such as `12 RUNNING`."""
    return ", ".join(f"{one.job} {one.state}" for one in jobs)
