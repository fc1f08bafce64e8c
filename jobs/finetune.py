"""`patchline finetune`: trains a run's weights further, usually at a higher resolution and with a new zero head."""

from jobs import pretrain
from pipeline.training.config import TrainingJob
from shards.errors import UserError


def run(job: TrainingJob, *, extend: bool = False) -> int:
    """Runs a fine-tuning job, which must name its initial weights. `extend`: as in pre-training."""
    if not job.initial.weights:
        raise UserError("--initial.weights is missing: give the weights/ folder of a finished run (RUN/weights)")
    return pretrain.run(job, stage="finetune", extend=extend)
