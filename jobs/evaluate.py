"""`patchline evaluate`: accuracy of a weights folder over every sample of a dataset, each exactly once."""

import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path

from jobs import exit_codes
from jobs.record import write_record
from pipeline.config_values import Device
from pipeline.data.evaluation import label_map
from pipeline.evaluation.config import EvaluationConfig
from pipeline.evaluation.scores import evaluate
from pipeline.models.weights import load_model, open_weights
from pipeline.training.config import LossName
from pipeline.world import current_world, enter, leave
from shards.dataset import open_dataset
from shards.errors import UserError

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class EvaluateJob:
    """`weights`: a weights folder (RUN/weights). `run_dir`: where scores.json and job.yaml go (empty: nowhere)."""

    weights: str = ""
    data: EvaluationConfig = EvaluationConfig()
    loss: LossName = "softmax"
    run_dir: str = ""
    device: Device = "auto"
    threads: int = 0
    """CPU threads of each rank; 0: OMP_NUM_THREADS where it is set, else the rank's share of the cores."""

    def __post_init__(self) -> None:
        if self.threads < 0:
            raise UserError(f"threads is {self.threads}; allowed are 0 (each rank's share of the cores) or more")


def run(job: EvaluateJob) -> int:
    """Evaluates and logs the scores; rank 0 writes them down."""
    for flag, value in (("--weights", job.weights), ("--data.url", job.data.url)):
        if not value:
            raise UserError(f"{flag} is missing: give the {'weights folder' if 'w' in flag else 'dataset'} as {flag}")
    world = current_world(job.device, threads=job.threads)
    weights, dataset = open_weights(job.weights), open_dataset(job.data.url)
    labels = weights.labels[: weights.config.num_classes]
    label_map(dataset, labels)
    enter(world)
    try:
        model = load_model(weights).to(world.device)
        scores = evaluate(model, dataset, job.data, labels=labels, loss=job.loss, world=world)
    finally:
        leave()
    if world.is_first:
        log.info(
            "%s on %s: accuracy %.4f, loss %.4f over %d images",
            job.weights,
            job.data.url,
            scores.accuracy,
            scores.loss,
            scores.num_images,
        )
        if job.run_dir:
            write_record(Path(job.run_dir), stage="evaluate", job=job)
            (Path(job.run_dir) / "scores.json").write_text(json.dumps(asdict(scores)) + "\n")
    return exit_codes.DONE
