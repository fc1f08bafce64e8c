"""`patchline cancel RUN|CHAIN`: cancels all jobs of a run or of a chain, waiting or running, and says which. The output
of a stage without a run directory, such as packing, will do as well."""

import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from jobs import exit_codes
from jobs.chains.checks import STOPPED_BY_HAND
from jobs.chains.state import CANCELLED, is_chain, jobs_begun_here, read_plan_of, state_folder
from jobs.cluster.folder_lock import alone
from jobs.cluster.queue import submitted_in
from jobs.cluster.slurm import QueuedJob, cancelled, queued_with
from jobs.output import work_in
from jobs.submittable import SUBMIT_FOLDER, output_name, run_name
from shards.errors import UserError
from shards.output.terminal import printable_name
from shards.schema.config_values import shown_value

log = logging.getLogger(__name__)
_PAUSE_SECONDS = 1.0
_MOST_SECONDS = 120.0


def run(words: list[str], *, environ: Mapping[str, str]) -> int:
    """0 once none of the jobs waits or runs. UserError if the word is no run or chain, or Slurm does not answer."""
    if len(words) != 1:
        raise UserError("usage: patchline cancel RUN|CHAIN, one folder")
    folder, shown = Path(words[0]), printable_name(words[0])
    if is_chain(words[0]):
        lock = state_folder(words[0])
        name, marker, recorded = read_plan_of(lock).name, lock / CANCELLED, jobs_begun_here(lock)
    elif (folder / SUBMIT_FOLDER).is_dir():
        lock = folder / SUBMIT_FOLDER
        name, marker, recorded = run_name(words[0]), lock / STOPPED_BY_HAND, submitted_in(lock)
    else:
        return _cancel_output(words[0], environ)
    work_in(folder)
    was_there, gone = marker.exists(), dict[str, QueuedJob]()
    marker.touch()  # first: a gate that runs at this moment submits nothing more
    try:
        _cancel_all(name, environ, recorded, gone=gone)
        with alone(lock):  # what was submitted meanwhile
            _cancel_all(name, environ, recorded, gone=gone)
    except Exception:
        if not gone and not was_there:  # nothing was cancelled, and the run or the chain goes on
            marker.unlink(missing_ok=True)
        raise
    if not gone:
        log.info("%s has no job that waits or runs", shown)
    return _told(gone, shown)


def _cancel_output(word: str, environ: Mapping[str, str]) -> int:
    """Cancels the job that is to write this folder or URL, of a stage without a run directory."""
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
    log.info("to go on, submit %s again", shown)
    return exit_codes.DONE


def _cancel_all(
    name: str, environ: Mapping[str, str], recorded: Sequence[str], *, gone: dict[str, QueuedJob]
) -> dict[str, QueuedJob]:
    """Cancels until the queue has none of the jobs, and adds those that were cancelled to `gone`, by their numbers."""
    deadline = time.monotonic() + _MOST_SECONDS
    while found := [one for one in queued_with(name, environ, recorded=recorded) if one.state != "COMPLETING"]:
        cancelled(sorted({str(one.number) if "[" in one.job else one.job for one in found}), environ)
        gone |= {one.job: one for one in found if one.job not in gone}
        if time.monotonic() > deadline:
            raise UserError(f"{found[0].job} does not end; see `scontrol show job {found[0].job}`")
        time.sleep(_PAUSE_SECONDS)
    return gone
