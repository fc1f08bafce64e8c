"""`patchline weights`: writes the weights of any committed checkpoint of a run to a weights folder."""

import logging
from functools import partial
from pathlib import Path

from jobs import exit_codes
from jobs.models.import_weights import labels_in_file, refuse_misplaced
from jobs.output import write_to
from jobs.record import open_job, read_record
from jobs.settings.models import WeightsJob
from jobs.stages import WITH_SMOKE
from pipeline.checkpoints.manifest import CheckpointId
from pipeline.checkpoints.stored import CheckpointChoice
from pipeline.shared_settings import RECORD_FILE
from pipeline.training.saving.finish import TakenRun, labels_of_data, take_weights
from pipeline.training.settings.job import TrainingJob
from shards.errors import UserError
from shards.store import open_store

__all__ = ["WeightsJob", "run"]

log = logging.getLogger(__name__)


def run(job: WeightsJob, *, overwrite: bool = False) -> int:
    """Writes the weights folder, completely or not at all, and changes nothing in the run. `overwrite`: write even if
    --out has other content."""
    run_dir = Path(job.run)
    refuse_misplaced(job.run, job.out, wanted="the folder")
    training = _training_job(run_dir)
    source = TakenRun(
        run_dir=run_dir,
        job=training,
        store=open_store(training.checkpoint.url or str(run_dir / "checkpoints")),
        labels_for=partial(labels_of_data, training),
    )
    if job.labels_file:
        labels = labels_in_file(job.labels_file, num_classes=training.model.num_classes)
        source = TakenRun(**{**vars(source), "labels_for": lambda _: labels})
    taken: list[CheckpointId] = []

    def write(out: Path) -> None:
        choice = CheckpointChoice(step=job.step, is_best=job.best)
        taken.append(take_weights(out, source, choice=choice, is_raw=job.raw))

    write_to(Path(job.out), write, overwrite=overwrite)
    kind = "averaged" if training.ema_decay and not job.raw else "raw"
    log.info("%s: %s, %s weights of step %d of %s", job.out, training.model.name, kind, taken[-1].step, job.run)
    return exit_codes.DONE


def _training_job(run_dir: Path) -> TrainingJob:
    """Returns the job of the run at `run_dir`. Raises UserError if there is no run, or if its stage does not train."""
    path = run_dir / RECORD_FILE
    try:
        is_there = path.is_file()
    except OSError as error:  # the name is too long, or access is denied
        raise UserError(f"no run at {str(run_dir)!r}: {error.strerror}", todo="give a run directory") from error
    if not is_there:
        raise UserError(
            f"no run at {str(run_dir)!r}: a run directory has a job.yaml; give the --run-dir of a pretrain or finetune"
        )
    stage = open_job(path).stage
    if stage not in WITH_SMOKE:
        raise UserError(f"{path} is of the stage {stage!r}; only pretrain and finetune have checkpoints")
    return read_record(path, stage=stage, kind=TrainingJob)
