"""What a run saves of its job."""

import json
from dataclasses import asdict

from pipeline.checkpoints.saved_job import SavedJob
from pipeline.training.settings.job import TrainingJob


def saved_job(job: TrainingJob) -> SavedJob:
    """What is saved of a job whose precision is decided."""
    fields = json.loads(json.dumps(asdict(job)))
    return SavedJob(
        model=fields["model"],
        loss=job.loss,
        optimizer=job.optimizer.name,
        ema_decay=job.ema_decay,
        precision=job.engine.precision,
        job=fields,
    )
