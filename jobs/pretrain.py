"""`patchline pretrain`: trains a model on a packed dataset; the same command again continues the run."""

from pathlib import Path

from jobs import exit_codes
from jobs.record import write_record
from pipeline.training.config import TrainingJob
from pipeline.training.run import Ending, prepare, train
from pipeline.world import current_world
from shards.errors import StorageError


def run(job: TrainingJob, *, stage: str = "pretrain") -> int:
    """Runs one training stage; the exit code says whether it is done or is to be continued."""
    world = current_world(job.device, threads=job.threads)
    try:
        prepared = prepare(job, world)
        ending = train(prepared, world, on_start=lambda job: write_record(prepared.run_dir, stage=stage, job=job))
    except StorageError as error:
        if not (Path(job.run_dir) / "job.yaml").exists():
            raise
        # The address was right when the run began: a fault to try again, not a mistake.
        raise ConnectionError(str(error)) from error
    return exit_codes.DONE if ending is Ending.DONE else exit_codes.CONTINUE
