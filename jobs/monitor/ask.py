"""Runs `patchline stop RUN`, `save RUN` and `cancel RUN|CHAIN`.

`stop` and `save` write a file to the run's folder, and the run obeys it at its next step. `cancel` cancels all pending
and running jobs of a run or a chain, and lists them. For a stage without a run directory, such as packing, `cancel`
takes the folder or URL of the output.
"""

import logging
import os
import shlex
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from jobs import exit_codes
from jobs.chains.done import STOPPED_BY_HAND
from jobs.chains.state import CANCELLED, is_chain, jobs_begun_here, read_plan_of, refuse_chain, state_folder
from jobs.chains.steps import STATE
from jobs.cluster.folder_lock import alone
from jobs.cluster.recorded_jobs import RecordedJob, is_copied, submitted_in
from jobs.cluster.slurm import QueuedJob, cancelled, queued_with
from jobs.output import work_in
from jobs.record import MOST_BYTES
from jobs.reports.ls import run_at
from jobs.submittable import SUBMIT_FOLDER, output_name, run_name
from pipeline.runs.facts import RunFacts
from pipeline.shared_settings import RECORD_FILE
from shards.config_values import shown_value
from shards.errors import InvalidDataError, UserError
from shards.files.local_files import read_local_file
from shards.files.looks import is_a_folder, patiently
from shards.output.terminal import printable_name

log = logging.getLogger(__name__)

_PAUSE_SECONDS, _MOST_SECONDS = 1.0, 120.0  # for cancel: the pause between two queries of the queue, and the limit


def run(words: list[str], *, command: str, environ: Mapping[str, str]) -> int:
    """Runs `stop`, `save` or `cancel`, as `command` says. Raises UserError if the folder is not a run, or if the
    request cannot be written. `environ` is the environment of the Slurm programs that cancel calls."""
    if command == "cancel":
        return cancel(words, environ=environ)
    if len(words) != 1 or words[0].startswith("-"):
        raise UserError(f"usage: patchline {command} RUN")
    run_dir = Path(words[0])
    facts = facts_at(run_dir)
    work_in(run_dir)
    (_save if command == "save" else _stop)(run_dir, facts)
    return exit_codes.DONE


def _stop(run_dir: Path, facts: RunFacts) -> None:
    if facts.state == "done":
        log.info("%s is done; there is nothing to stop", _shown(run_dir))
        return
    _refuse_copy(run_dir, facts)
    _write(run_dir / "STOP")
    when = "at its next step it saves and stops" if facts.state == "running" else "it stays stopped, in any job"
    log.info("%s: %s; to continue, delete %s and start it again", _shown(run_dir), when, _shown(run_dir / "STOP"))


def _save(run_dir: Path, facts: RunFacts) -> None:
    _refuse_copy(run_dir, facts)
    if facts.state != "running":
        raise UserError(f"{str(run_dir)!r} is {facts.state}, and only a running one can save; see `patchline status`")
    _write(run_dir / "SAVE")
    log.info("%s: it saves at its next step, and continues", _shown(run_dir))


def _refuse_copy(run_dir: Path, facts: RunFacts) -> None:
    """Raises UserError for the copy of a run that was running when it was copied. The copy's files still say that the
    run is running."""
    if facts.state == "running" and (original := _original_of(run_dir)):
        raise UserError(
            f"{str(run_dir)!r} is a copy of {original}, which is another run, and what is asked here does not reach "
            "it; give the folder of the run itself"
        )


def _original_of(run_dir: Path) -> str:
    """Returns the folder that this one is a copy of, or an empty string if it is not a copy. The first line of a run's
    record names its folder, and each submission records the folder's inode."""
    with suppress(OSError, InvalidDataError):
        head = read_local_file(run_dir / RECORD_FILE, most_bytes=MOST_BYTES).decode(errors="replace").partition("\n")[0]
        named = Path(head.split(" ", 3)[-1]).parent  # `# patchline STAGE PATH`
        if named.is_absolute() and is_there(named / RECORD_FILE) and not named.samefile(run_dir):
            return repr(str(named))
    return "another folder" if is_copied(run_dir / SUBMIT_FOLDER) else ""


def _write(path: Path) -> None:
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o666))
        os.utime(path)
    except OSError as error:
        raise UserError(
            f"cannot write {str(path)!r}: {error.strerror}", todo="do it as the user who started the run"
        ) from error


def _shown(path: Path) -> str:
    return printable_name(str(path))


def cancel(words: list[str], *, environ: Mapping[str, str]) -> int:
    """Cancels the jobs of a run, a chain or an output. Returns 0 once no such job is pending or running. Raises
    UserError if `words` names neither a run, a chain nor an output, or if Slurm does not answer."""
    if len(words) != 1:
        raise UserError("usage: patchline cancel RUN|CHAIN, one folder")
    folder, shown = Path(words[0]), printable_name(words[0])
    if is_chain(words[0]):
        lock = state_folder(words[0])
        name, marker, recorded = read_plan_of(lock).name, lock / CANCELLED, jobs_begun_here(lock)
    elif is_a_folder(folder / SUBMIT_FOLDER):
        lock = folder / SUBMIT_FOLDER
        name, marker, recorded = run_name(words[0]), lock / STOPPED_BY_HAND, submitted_in(lock)
    else:
        return _cancel_output(words[0], environ)
    work_in(folder)
    was_there, gone = patiently(marker, marker.exists), dict[str, QueuedJob]()
    marker.touch()  # made first, so that a gate that runs now submits no more jobs
    try:
        _cancel_all(name, environ, recorded, gone=gone)
        with alone(lock):  # the second call cancels jobs that were submitted during the first
            _cancel_all(name, environ, recorded, gone=gone)
    except Exception:
        if not gone and not was_there:  # nothing was cancelled: the run or chain continues
            marker.unlink(missing_ok=True)
        raise
    if not gone:
        log.info("%s has no job that waits or runs", shown)
    return _told(gone, shown)


def _cancel_output(word: str, environ: Mapping[str, str]) -> int:
    """Cancels the job that will write this folder or URL, for a stage without a run directory."""
    neither = f"{shown_value(word)} is neither a run nor a chain that was submitted; give its folder"
    try:
        gone = _cancel_all(output_name(word), environ, [], gone={})
    except UserError as error:
        raise UserError(f"{neither}. If a job is to write it: {error}") from error
    if not gone:
        raise UserError(f"{neither}. No job that waits or runs is to write it")
    return _told(gone, printable_name(word))


def _told(gone: Mapping[str, QueuedJob], shown: str) -> int:
    for one in gone.values():
        log.info("cancelled %s, which was %s%s", one.job, one.state, f": {one.tag}" if one.tag else "")
    log.info("to continue, submit %s again", shown)
    return exit_codes.DONE


def _cancel_all(
    name: str, environ: Mapping[str, str], recorded: Sequence[RecordedJob], *, gone: dict[str, QueuedJob]
) -> dict[str, QueuedJob]:
    """Cancels jobs until none is left in the queue. Adds each job to `gone` under its number, and returns `gone`."""
    deadline = time.monotonic() + _MOST_SECONDS
    while found := [one for one in queued_with(name, environ, recorded=recorded) if one.state != "COMPLETING"]:
        cancelled(sorted({str(one.number) if "[" in one.job else one.job for one in found}), environ)
        gone |= {one.job: one for one in found if one.job not in gone}
        if time.monotonic() > deadline:
            raise UserError(f"{found[0].job} does not end; see `scontrol show job {found[0].job}`")
        time.sleep(_PAUSE_SECONDS)
    return gone


def facts_at(run_dir: Path) -> RunFacts:
    """Returns the facts of the run in a folder. Raises UserError if the folder is not a run."""
    record = run_dir / RECORD_FILE
    found = run_at(run_dir, run_dir, time.time()) if patiently(record, record.exists) else None
    if found is None:
        shown = shlex.quote(str(run_dir))
        refuse_chain(str(run_dir), hint=f", or cancel all of its jobs: `patchline cancel {shown}`")
        raise UserError(
            f"{str(run_dir)!r} is no run: it has no job.yaml; `patchline ls DIR` lists the runs in a folder"
        )
    return found.facts


def refuse_no_run(run_dir: Path) -> None:
    """Raises UserError unless the folder is a run, or was submitted and waits for its first job to start."""
    if why := why_unreadable(run_dir, parts=("", STATE)):
        raise UserError(f"{str(run_dir)!r} cannot be read: {why}; ask its owner for access")
    if not is_begun(run_dir):
        refuse_chain(str(run_dir))
    if not is_a_folder(run_dir) or not is_begun(run_dir):
        raise UserError(
            f"{str(run_dir)!r} is no run: it has no job.yaml; `patchline ls DIR` lists the runs in a folder"
        )


def is_begun(run_dir: Path) -> bool:
    """Whether a folder is a run, or was submitted and waits for its first job to start."""
    return any(is_there(run_dir / name) for name in (RECORD_FILE, "submit"))


def why_unreadable(folder: Path, *, parts: Sequence[str] = ("", "submit", STATE)) -> str:
    """Returns the reason why this user cannot read the folder of a run or a chain, for example because it belongs to a
    colleague. `parts`: the subfolders to check; an empty name stands for the folder. Returns an empty string if all of
    them can be read or do not exist."""
    try:
        for name in parts:
            if is_a_folder(folder / name):
                os.scandir(folder / name).close()
    except PermissionError as error:
        return f"{error.strerror} at {printable_name(str(error.filename))}"
    return ""


def is_there(path: Path) -> bool:
    """Whether a file exists. A file that this user has no access to counts as missing. Waits while the storage fails,
    and raises its OSError after two minutes."""
    try:
        return patiently(path, path.exists)
    except PermissionError:
        return False
