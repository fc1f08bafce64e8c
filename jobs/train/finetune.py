"""`patchline finetune`: trains a run's weights further, usually at a higher resolution and with a new zero head."""

from jobs.train import pretrain
from pipeline.runs.starts import NO_ORIGIN, Origin
from pipeline.training.run import NO_STEPS
from pipeline.training.settings.job import TrainingJob
from shards.errors import UserError


def run(job: TrainingJob, *, extend: bool = False, profile: range = NO_STEPS, origin: Origin = NO_ORIGIN) -> int:
    """Runs a fine-tuning job, which must name its initial weights. `extend`, `profile` and `origin`: as in
    pre-training."""
    if not job.initial.weights:
        raise UserError("--initial.weights is missing: give a run or published weights (docs/from-weights.md)")
    return pretrain.run(job, stage="finetune", extend=extend, profile=profile, origin=origin)
