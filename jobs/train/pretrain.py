"""`patchline pretrain` and `patchline finetune`: train a model on a packed dataset. The same command continues a
run."""

from pathlib import Path

from jobs import exit_codes
from jobs.record import write_record
from pipeline.ranks.world import current_world
from pipeline.runs.starts import NO_ORIGIN, Origin
from pipeline.shared_settings import RECORD_FILE
from pipeline.training.run import NO_STEPS, RunEnding, RunRecord, train
from pipeline.training.settings.job import TrainingJob
from pipeline.training.zero.step_times import refuse_later_steps
from shards.errors import StorageError, UnreachableError
from shards.files.looks import is_there

_CODES = {
    RunEnding.DONE: exit_codes.DONE,
    RunEnding.STOPPED: exit_codes.CONTINUE,
    RunEnding.INTERRUPTED: exit_codes.INTERRUPTED,
    RunEnding.UNSAVED: exit_codes.CRASH,
}


def run(
    job: TrainingJob,
    *,
    stage: str = "pretrain",
    extend: bool = False,
    profile: range = NO_STEPS,
    origin: Origin = NO_ORIGIN,
) -> int:
    """Runs one training stage, and returns the exit code, which says whether the run is done or can be continued.
    `extend`: whether the job may have more steps than the run that it continues. `profile`: the steps to trace.
    `origin`: where the job comes from."""
    refuse_later_steps(profile, num_steps=job.steps)
    world, run_dir = current_world(job.device, threads=job.threads), Path(job.run_dir)
    try:
        ending = train(
            job,
            world,
            record=RunRecord(write=lambda job: write_record(run_dir, stage=stage, job=job), origin=origin),
            extend=extend,
            profile=profile,
        )
    except UnreachableError as error:
        if not is_there(run_dir / RECORD_FILE):
            raise
        raise StorageError(str(error)) from error  # since the address worked when the run began
    return _CODES[ending]
