"""`patchline cancel RUN|CHAIN`: cancels all jobs of a run or of a chain, waiting or running, and says which."""

import logging
import time
from collections.abc import Mapping
from pathlib import Path

from jobs import exit_codes
from jobs.chain_checks import STOPPED_BY_HAND
from jobs.chain_state import CANCELLED, chain_comment, is_chain, state_folder
from jobs.slurm import QueuedJob, cancelled, queued
from jobs.submitted import comment_of, submit_folder
from shards.config_values import shown_value
from shards.errors import UserError
from shards.terminal import printable_name

log = logging.getLogger(__name__)
_QUIET_LOOKS = 2  # in a row at which the queue must have none of the jobs: a gate may just be submitting one
_PAUSE_SECONDS = 1.0
_MOST_SECONDS = 120.0


def run(words: list[str], *, environ: Mapping[str, str]) -> int:
    """0 once none of the jobs waits or runs. UserError if the word is no run or chain, or Slurm does not answer."""
    if len(words) != 1:
        raise UserError("usage: patchline cancel RUN|CHAIN, one folder")
    folder, shown = Path(words[0]), printable_name(words[0])
    if is_chain(words[0]):
        state = state_folder(words[0])
        name, marker = chain_comment(state), state / CANCELLED
    elif (folder / "submit").is_dir():
        name, marker = comment_of([str(submit_folder(words[0], ""))]), folder / "submit" / STOPPED_BY_HAND
    else:
        raise UserError(f"{shown_value(words[0])} is neither a run nor a chain that was submitted; give its folder")
    marker.touch()  # first: a gate that runs at this moment submits nothing more
    gone = _cancel_all(name, environ)
    if not gone:
        log.info("%s has no job that waits or runs", shown)
    for one in gone:
        log.info("cancelled %s, which was %s%s", one.job, one.state, f": {one.tag}" if one.tag else "")
    log.info("to go on, submit %s again", shown)
    return exit_codes.DONE


def _cancel_all(name: str, environ: Mapping[str, str]) -> list[QueuedJob]:
    gone: dict[str, QueuedJob] = {}
    quiet, deadline = 0, time.monotonic() + _MOST_SECONDS
    while quiet < _QUIET_LOOKS:
        found = [one for one in queued(name, environ) if one.state != "COMPLETING"]
        quiet = 0 if found else quiet + 1
        if found:
            gone |= {one.job: one for one in reversed(found) if one.job not in gone}
            cancelled(sorted({one.job.partition("_")[0] for one in found}), environ)
        if time.monotonic() > deadline:
            raise UserError(f"{found[0].job if found else 'a job'} does not end; see `scontrol show job`")
        time.sleep(_PAUSE_SECONDS)
    return list(gone.values())
