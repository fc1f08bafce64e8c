"""`patchline submit STAGE RECIPE --cluster FILE [--nodes N] [...]`: writes the batch script of a job, and submits it.

The words of the stage are checked as the stage would check them, and the script by `sbatch --test-only`, before it is
submitted. A run that has a job in the queue gets no second one. Does not load torch.
"""

import fcntl
import hashlib
import json
import logging
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jobs import exit_codes
from jobs.batch_script import Request, batch_script, names_of
from jobs.cluster import read_cluster, refuse_wrong_limit, with_command
from jobs.flags import flags_of
from jobs.lookup import job_of
from jobs.mistakes import refuse_missing
from jobs.run_flags import take_run_flags
from jobs.screen import put
from jobs.slurm import need_sbatch, queued, slurms_answer, submitted
from jobs.stages import STAGES
from jobs.submit_checks import refuse_what_cannot_work
from shards.config_values import shown_value, whole_number
from shards.errors import UserError
from shards.terminal import printable_name

log = logging.getLogger(__name__)
Override = Callable[[Any, list[str], str], Any]
SUBMITTED = ("pretrain", "finetune", "evaluate")
USAGE = "patchline submit STAGE RECIPE --cluster FILE [--nodes N] [--time LIMIT] [--dry-run] [--any.field VALUE ...]"
_MOST_NODES = 100_000
_BODIES = (Path(__file__).parent / "stage.sbatch", Path(__file__).parents[1] / "slurm" / "stage.sbatch")


@dataclass(frozen=True, kw_only=True)
class Options:
    """The flags of submit itself."""

    cluster: str = ""
    nodes: int = 1
    time_limit: str = ""
    is_dry: bool = False
    has_checks: bool = True


def run(words: list[str], *, override: Override, environ: Mapping[str, str]) -> int:
    """Submits, and returns the exit code. UserError for what Slurm or the stage would refuse."""
    options, words = take_options(words)
    if len(words) < 2 or words[1].startswith("-"):
        raise UserError(f"usage: {USAGE}")
    stage, recipe = words[:2]
    if stage not in SUBMITTED:
        raise UserError(f"{shown_value(stage)} is no stage that submit knows; allowed: {', '.join(SUBMITTED)}")
    if not options.cluster:
        raise UserError("--cluster is missing: the YAML file of your cluster's settings, as slurm/cluster.example.yaml")
    fields, _ = take_run_flags(stage, words[2:])
    job = override(job_of(recipe, stage), fields, f"patchline {stage} {recipe}")
    refuse_missing(list(flags_of(job)), STAGES[stage].required)
    cluster = with_command(read_cluster(Path(options.cluster)), environ)
    run_dir = getattr(job, "run_dir", "")
    if run_dir and not any(word.partition("=")[0] == "--run-dir" for word in words):
        words = [*words, "--run-dir", run_dir]  # from a file: the script looks for it among the words
    if options.has_checks:
        refuse_what_cannot_work(words, cluster, run_dir=run_dir, nodes=options.nodes, limit=options.time_limit)
    folder = _folder(run_dir, stage)
    work = [str(folder)] if run_dir else [str(folder), *words]  # evaluations of one folder are different work
    request = Request(
        words=tuple(words),
        name=names_of(words),
        comment=f"patchline-{hashlib.sha256(json.dumps(work).encode()).hexdigest()[:16]}",
        nodes=options.nodes,
        time_limit=options.time_limit,
        folder=folder,
        chdir=Path.cwd(),
    )
    text = batch_script(request, cluster, body=_body())
    if options.is_dry:
        put(text)
        return _tell_test(request, text, environ)
    return _submit(request, text, environ)


def take_options(words: list[str]) -> tuple[Options, list[str]]:
    """The flags of submit out of a command's words, and the other words. UserError if one is wrong."""
    options, rest, left = Options(), [], iter(words)
    for word in left:
        name, has_value, value = word.partition("=")
        if word == "--dry-run":
            options = replace(options, is_dry=True)
        elif word == "--no-check":
            options = replace(options, has_checks=False)
        elif name not in ("--cluster", "--nodes", "--time"):
            rest.append(word)
        else:
            given = value if has_value else next(left, "")
            options = _with(options, name, given)
    return options, rest


def _with(options: Options, name: str, value: str) -> Options:
    if name == "--cluster":
        return replace(options, cluster=value)
    if name == "--time":
        refuse_wrong_limit(value, what="--time")
        return replace(options, time_limit=value)
    nodes = whole_number(value)
    if nodes is None or not 1 <= nodes <= _MOST_NODES:
        raise UserError(f"--nodes is {shown_value(value)}; allowed: 1 to {_MOST_NODES:,}")
    return replace(options, nodes=nodes)


def _folder(run_dir: str, stage: str) -> Path:
    """Where the script and the log go: RUN/submit, or ./patchline-STAGE for a stage without a run directory."""
    return (Path(run_dir) / "submit" if run_dir else Path(f"patchline-{stage}")).absolute()


def _body() -> str:
    return next(path for path in _BODIES if path.is_file()).read_text()


def _submit(request: Request, text: str, environ: Mapping[str, str]) -> int:
    need_sbatch(environ)
    try:
        request.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"cannot make {request.folder}: {error.strerror}; give a folder that you may write to"
        ) from error
    with _alone(request.folder):
        waiting = _jobs_of(request, environ)
        if waiting:
            log.info("%s has a job already: %s; nothing was submitted", request.name, waiting)
            return exit_codes.DONE
        path = request.folder / f"{request.name}.sbatch"
        path.touch(mode=0o600)
        path.write_text(text)
        log.info("%s", slurms_answer([str(path)], environ))
        job_id = submitted([str(path)], environ)
        line = {"job": job_id, "unix_time": round(time.time(), 3), "script": path.name, "words": request.words}
        with (request.folder / "submitted.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
    shown = printable_name(str(request.folder))
    log.info(
        "job %s: %s on %s nodes; its log: %s/%s-%s.out",
        job_id,
        request.name,
        request.nodes,
        shown,
        request.name,
        job_id,
    )
    return exit_codes.DONE


def _tell_test(request: Request, text: str, environ: Mapping[str, str]) -> int:
    """Says what Slurm would do with the script, if there is a Slurm; writes nothing that stays."""
    if shutil.which("sbatch", path=environ.get("PATH")) is None:
        log.warning("no sbatch on this machine, so Slurm was not asked about it")
        return exit_codes.DONE
    log.info("%s", slurms_answer([], environ, text=text))
    waiting = _jobs_of(request, environ)
    if waiting:
        log.info("%s has a job already: %s", request.name, waiting)
    return exit_codes.DONE


def _jobs_of(request: Request, environ: Mapping[str, str]) -> str:
    """The jobs of this run that wait or run, such as `12 RUNNING`."""
    return ", ".join(f"{one.job} {one.state}" for one in queued(request.comment, environ))


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One submission of a run at a time, on this host."""
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
