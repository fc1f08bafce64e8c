"""`patchline pretrain`: trains a model on a packed dataset; the same command continues the run."""

from pathlib import Path

from jobs import exit_codes
from jobs.record import write_record
from pipeline.training.config import TrainingJob
from pipeline.training.run import Ending, train
from pipeline.world import current_world
from shards.errors import StorageError, UnreachableError

_CODES = {
    Ending.DONE: exit_codes.DONE,
    Ending.STOPPED: exit_codes.CONTINUE,
    Ending.INTERRUPTED: exit_codes.INTERRUPTED,
    Ending.UNSAVED: exit_codes.CRASH,
}


def run(job: TrainingJob, *, stage: str = "pretrain", extend: bool = False) -> int:
    """Runs one training stage; the exit code says whether it is done or to be continued. `extend`: the job may have
    more steps than the run that it continues."""
    world, run_dir = current_world(job.device, threads=job.threads), Path(job.run_dir)
    try:
        ending = train(job, world, write_record=lambda job: write_record(run_dir, stage=stage, job=job), extend=extend)
    except UnreachableError as error:
        if not (run_dir / "job.yaml").exists():
            raise
        raise StorageError(str(error)) from error  # the address was right when the run began
    return _CODES[ending]
