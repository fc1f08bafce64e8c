"""`patchline pretrain`: trains a model on a packed dataset; the same command again continues the run."""

import logging

from jobs import exit_codes
from jobs.record import write_record
from pipeline.training.config import TrainingJob
from pipeline.training.run import Ending, prepare, train
from pipeline.world import current_world

log = logging.getLogger(__name__)


def run(job: TrainingJob, *, stage: str = "pretrain") -> int:
    """Runs one training stage; the exit code says whether it is done or is to be continued."""
    world = current_world(job.device)
    prepared = prepare(job, world)
    if world.is_first:
        write_record(prepared.run_dir, stage=stage, job=prepared.job)
    ending = train(prepared, world)
    return exit_codes.DONE if ending is Ending.DONE else exit_codes.CONTINUE
