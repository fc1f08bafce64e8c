"""`patchline __done RUN`, which slurm/stage.sbatch asks before a job ends with 0: whether the run is complete."""

import logging
from pathlib import Path

from jobs import exit_codes
from jobs.record import read_leaves
from pipeline.training.saving.finish import read_done
from shards.errors import InvalidDataError, UserError
from shards.schema.config_values import whole_number

log = logging.getLogger(__name__)


def run(words: list[str]) -> int:
    """0 if RUN/DONE vouches for the weights beside it, at the last step of RUN/job.yaml; else 1, with the reason."""
    if len(words) != 1:
        raise UserError(f"__done takes one run directory; {len(words)} words were given")
    folder = Path(words[0])
    try:
        done, num_steps = read_done(folder), whole_number(read_leaves(folder / "job.yaml").get("job.steps", ""))
    except (OSError, InvalidDataError) as error:
        log.error("%s: %s", folder / "job.yaml", error)
        return exit_codes.FAULTS_FOUND
    if done is None:
        log.error("%s is missing, or does not vouch for the weights beside it", folder / "DONE")
        return exit_codes.FAULTS_FOUND
    if done.step < (num_steps or 0):
        log.error("%s is of step %s, and the run has %s steps", folder / "DONE", f"{done.step:,}", f"{num_steps:,}")
        return exit_codes.FAULTS_FOUND
    return exit_codes.DONE
