"""Everything that defines one training run, pre-training or fine-tuning."""

from dataclasses import dataclass

from pipeline.config_values import refuse_wrong_values
from pipeline.data.config import DataConfig
from pipeline.evaluation.scores import EvaluationConfig
from pipeline.models import ModelConfig
from pipeline.training.checkpoint import CheckpointConfig
from pipeline.training.engine import EngineConfig
from pipeline.training.loss import LossName
from pipeline.training.optimizer import OptimizerConfig, scaled_by_rate
from pipeline.training.schedule import ScheduleConfig
from pipeline.world import Device
from shards.errors import UserError


@dataclass(frozen=True, kw_only=True)
class InitialConfig:
    """Weights to start from instead of scratch: a weights folder (RUN/weights). `new_head` replaces the head by a
    zero-initialised linear one, as the paper fine-tunes; False demands that every tensor fits."""

    weights: str = ""
    new_head: bool = True


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """One run. `clip_norm` 0 switches clipping off (the paper clips at 1 on ImageNet-1k and when fine-tuning only).
    `micro_batch` 0 takes a rank's share of the global batch in one pass. `label_smoothing`: of the softmax loss.
    `average_factor`: Polyak averaging, 0 for none; the weights that the run leaves are then the average (0.9999 in the
    paper's ImageNet results, section 4.1), while scores during training are those of the weights it trains."""

    run_dir: str = ""
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    initial: InitialConfig = InitialConfig()
    steps: int = 1000
    global_batch: int = 4096
    micro_batch: int = 0
    loss: LossName = "softmax"
    label_smoothing: float = 0.0
    clip_norm: float = 0.0
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    average_factor: float = 0.0
    engine: EngineConfig = EngineConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    seed: int = 0
    device: Device = "auto"
    log_every_steps: int = 1
    max_skipped_updates: int = 10

    def __post_init__(self) -> None:
        refuse_wrong_values(self, where="")
        if self.steps < 1 or self.clip_norm < 0 or self.log_every_steps < 1 or self.micro_batch < 0:
            raise UserError(
                f"allowed are steps and log_every_steps of 1 or more, clip_norm and micro_batch of 0 or more; "
                f"given are {self.steps}, {self.log_every_steps}, {self.clip_norm} and {self.micro_batch}"
            )
        if self.schedule.warmup_steps >= self.steps and self.schedule.decay != "constant":
            raise UserError(
                f"schedule.warmup_steps is {self.schedule.warmup_steps}, not below the {self.steps} steps of the run; "
                "lower --schedule.warmup-steps or raise --steps"
            )
        if not (0 <= self.label_smoothing < 1 and 0 <= self.average_factor < 1):
            raise UserError(
                f"label_smoothing is {self.label_smoothing} and average_factor {self.average_factor}; "
                "allowed are 0 (off) to below 1"
            )
        if self.label_smoothing and self.loss != "softmax":
            raise UserError(
                f"label_smoothing is {self.label_smoothing} with loss {self.loss!r}; it is part of the softmax loss: "
                "take --loss softmax, or --label-smoothing 0"
            )
        scaled_by_rate(self.optimizer, peak_rate=self.schedule.learning_rate)  # refuses what has no such scale
