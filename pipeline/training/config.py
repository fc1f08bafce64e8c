"""Everything that defines one training run, pre-training or fine-tuning."""

from dataclasses import dataclass, replace
from typing import Literal

from pipeline.config_values import Device, refuse_wrong_values
from pipeline.data.config import DataConfig
from pipeline.evaluation.config import EvaluationConfig
from pipeline.models.config import ModelConfig
from pipeline.training.schedule import ScheduleConfig
from shards.errors import UserError

LossName = Literal["softmax", "sigmoid"]


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """`decay` says which tensors `weight_decay` touches: `kernels` only matrices and convolutions (big_vision's mask
    `.*/kernel$`), `all` every parameter. `decay_scale` says what it is multiplied with at each step: the learning
    `rate` (PyTorch's AdamW), or the `schedule` alone, as big_vision does. `head_decay` multiplies it for the head's
    matrix (100 in ViT-G). SGD takes `momentum`; its weight decay is part of the gradient (PyTorch's SGD)."""

    name: Literal["adamw", "sgd"] = "adamw"
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    momentum: float = 0.9
    weight_decay: float = 0.0
    decay: Literal["kernels", "all"] = "kernels"
    decay_scale: Literal["rate", "schedule"] = "rate"
    head_decay: float = 1.0

    def __post_init__(self) -> None:
        refuse_wrong_values(self, where="optimizer.")
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1 and 0 <= self.momentum < 1 and self.weight_decay >= 0):
            raise UserError(f"allowed are betas and momentum from 0 to below 1 and a decay of 0 or more: {self}")
        if self.epsilon <= 0 or self.head_decay < 0:
            raise UserError(
                f"optimizer.epsilon is {self.epsilon} and optimizer.head_decay {self.head_decay}; "
                "allowed are an epsilon above 0 and a head_decay of 0 or more (1: as every other matrix)"
            )
        if self.name == "sgd" and self.decay_scale == "schedule":
            raise UserError(
                "optimizer.decay_scale is 'schedule' with optimizer.name 'sgd', whose decay is part of the gradient; "
                "take --optimizer.decay-scale rate, or --optimizer.name adamw"
            )


def scaled_by_rate(config: OptimizerConfig, *, peak_rate: float) -> OptimizerConfig:
    """The same decay as a multiple of the learning rate, whose peak is `peak_rate`. UserError where that is 0."""
    if config.decay_scale == "rate":
        return config
    if peak_rate <= 0:
        raise UserError(
            f"schedule.learning_rate is {peak_rate} with optimizer.decay_scale 'schedule'; a decay that follows the "
            "schedule needs one: give a rate above 0, or --optimizer.decay-scale rate"
        )
    return replace(config, decay_scale="rate", weight_decay=config.weight_decay / peak_rate)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """ZeRO stage (1: optimiser state, 2: and gradients, 3: and weights) and the precision of weights and activations.

    "auto" precision is decided when a run first starts and kept when it continues, whatever the machine: bf16 takes 8
    times as long on a CPU with AVX2 alone. Masters are fp32 always.
    `compile`: torch.compile of the model's blocks; "auto" does it on GPUs under ZeRO-1 and 2 where it works, "on"
    demands it. `activation_checkpointing`: each block keeps its input only and is computed again on the way back: less
    memory, one more forward pass, the same bits. Both may change when a run continues; with compilation results then
    change to rounding, as on another device, and dropout draws other masks: bitwise equality needs the same.
    Bucket sizes are in elements: DeepSpeed's default of 5e8 would leave ViT-H/14 a single bucket and no overlap.
    """

    zero_stage: Literal[1, 2, 3] = 1
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """Precision of weights and activations in forward and backward passes; auto: bf16 where every rank's device
    computes it natively (GPUs of compute capability 8.0 and more, CPUs with AVX512-BF16, AMX or Arm BF16), else
    fp32."""
    compile: Literal["auto", "on", "off"] = "auto"
    activation_checkpointing: bool = False
    reduce_bucket: int = 50_000_000
    allgather_bucket: int = 200_000_000

    def __post_init__(self) -> None:
        if self.reduce_bucket < 1 or self.allgather_bucket < 1:
            raise UserError(f"engine buckets are counted in elements and must be 1 or more: {self}")
        if self.compile == "on" and self.zero_stage == 3:
            # Tried with 0.19.8: right numbers, but its hooks, which gather the weights inside a block, cut each block
            # into pieces that torch compiles again at every step.
            raise UserError(
                'engine.compile is "on" with engine.zero_stage 3; allowed are stages 1 and 2 (torch would compile '
                "DeepSpeed's gathering of weights again at every step): give --engine.zero-stage 2, or "
                "--engine.compile off"
            )


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """A checkpoint every `every_steps` and at the end; the newest `keep_newest` are kept, and every `keep_every`-th
    step for good (0: none). `url`: a folder or s3://bucket/prefix instead of RUN/checkpoints; on its way to S3 a rank's
    share lies in a temporary file, in TMPDIR."""

    every_steps: int = 1000
    keep_newest: int = 2
    keep_every: int = 0
    url: str = ""

    def __post_init__(self) -> None:
        if self.every_steps < 1 or self.keep_newest < 1 or self.keep_every < 0:
            raise UserError(f"allowed are every_steps and keep_newest of 1 or more, keep_every of 0 or more: {self}")


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
    threads: int = 0
    """CPU threads of each rank, for computing and for decoding (which --data.num-threads may set apart); 0:
    OMP_NUM_THREADS where it is set, else the rank's share of the cores."""
    log_every_steps: int = 1
    max_skipped_updates: int = 10

    def __post_init__(self) -> None:
        refuse_wrong_values(self, where="")
        if self.threads < 0:
            raise UserError(f"threads is {self.threads}; allowed are 0 (each rank's share of the cores) or more")
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
