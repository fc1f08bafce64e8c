"""Everything that defines one training run, pre-training or fine-tuning."""

import math
from dataclasses import dataclass, replace
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pipeline.checkpoints.config import CheckpointConfig
from pipeline.data.config import DataConfig
from pipeline.evaluation.config import EvaluationConfig, FewshotInTraining
from pipeline.models.config import ModelConfig, ModeOrNone
from pipeline.ranks.environment import MOST_SECONDS, TimeLimits
from pipeline.shared_settings import ClassWeights, Device, LossName
from pipeline.training.settings.schedule import MOST_STEPS, ScheduleConfig, refuse_long_schedule
from pipeline.training.settings.tokens import (
    TokenPhase,
    TokensConfig,
    phases_of,
    refuse_for_tokens,
    sizes_of_steps,
    with_patch,
)
from shards.config_values import Range, refuse_wrong_values, shown_value
from shards.errors import UserError
from shards.output.quantities import plural

_MOST_PROJECT_CHARACTERS, _NOT_IN_WANDB = 128, "/\\#?%:"  # limits of a project's name at W&B
_MOST_LOSSES = 4096  # the most losses that a manifest keeps
# The most elements of a bucket on a CPU. The C library keeps freed blocks of up to 32 MiB. Larger ones go back to the
# kernel, which then has to clear their pages again in each step.
MOST_ON_CPU = 7_500_000
_MOST_BATCH = 1 << 24  # step times batch is a position in the sample order, which has 64 bits
MOST_THREADS = 1024
_FLOAT8_MULTIPLE, _FUSED_MULTIPLE = 16, 8


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimiser and its weight decay."""

    name: Literal["adamw", "sgd", "muon", "lamb", "adafactor"] = "adamw"
    """AdamW, SGD with momentum, Muon (orthogonal updates for the matrices of a Transformer's blocks, and AdamW for all
    else), LAMB (Adam with a trust ratio for each decayed parameter), or Adafactor (big_vision's, with factored second
    moments)."""
    beta1: Annotated[float, Range(0, below=1)] = 0.9
    """AdamW, LAMB and Adafactor: decay of the running mean of gradients (Adafactor: of updates), from 0 to below 1."""
    beta2: Annotated[float, Range(0, below=1)] = 0.999
    """AdamW and LAMB: decay of the squared gradient's running mean, from 0 to below 1; Adafactor: its largest decay,
    which is 1 - t^-0.8 in update t."""
    epsilon: Annotated[float, Range(above=0)] = 1e-8
    """AdamW and LAMB: added to the denominator."""
    momentum: Annotated[float, Range(0, below=1)] = 0.9
    """SGD: momentum, from 0 to below 1."""
    weight_decay: Annotated[float, Range(0)] = 0.0
    """Weight decay, 0 for none; with sgd it is part of the gradient, as in PyTorch, and lamb needs some."""
    decay: Literal["kernels", "all"] = "kernels"
    """Parameters with weight decay: kernels (matrices and convolutions, as big_vision's mask .*/kernel$) or all."""
    decay_scale: Literal["rate", "schedule"] = "rate"
    """What multiplies weight decay at each step: the learning rate (as PyTorch's AdamW), or the schedule alone (as
    big_vision)."""
    head_decay: Annotated[float, Range(0)] = 1.0
    """Factor for the weight decay of the head's matrix (100 in ViT-G)."""
    layer_decay: Annotated[float, Range(above=0, most=1)] = 1.0
    """Factor for the learning rate from each layer to the one below it, 1 for none: the head has the whole rate, the
    last block this share of it, and so on down to the embedding (0.65 to 0.75 is usual in fine-tuning)."""
    freeze_backbone: bool = False
    """Train the head alone (with the hidden layer before it, if there is one) on the weights that the run starts
    from."""
    muon_momentum: Annotated[float, Range(0, below=1)] = 0.95
    """Muon: decay of the gradient's running mean for the matrices, from 0 to below 1."""
    first_moment: Literal["fp32", "bf16"] = "fp32"
    """AdamW and Adafactor: precision in which the running mean of gradients (Adafactor: of updates) is kept between
    steps; bf16 saves 2 bytes per parameter (as big_vision)."""
    sam_rho: Annotated[float, Range(0, zero="off")] = 0.0
    """SAM, with any of the optimisers: each update takes the gradient at weights at this L2 distance from the model's,
    over all trained parameters, in the direction in which the loss rises most; 0: at the model's own weights. A step
    computes its batch twice, under ZeRO-1 only. 0.05 is usual for ResNets, 0.2 for ViT-B/16 from scratch."""

    def __post_init__(self) -> None:
        refuse_wrong_values(self, where="optimizer.")
        if self.name == "muon" and self.freeze_backbone:
            raise UserError(
                "optimizer.name is 'muon' with optimizer.freeze_backbone: only the head is trained, which Muon leaves "
                "to AdamW; give --optimizer.name adamw, or --optimizer.no-freeze-backbone"
            )
        if self.name not in ("adamw", "adafactor") and self.first_moment == "bf16":
            raise UserError(
                f"optimizer.first_moment is 'bf16' with optimizer.name {self.name!r}; it is a setting of AdamW and "
                "Adafactor: give --optimizer.first-moment fp32, or --optimizer.name adamw"
            )
        if self.name in ("sgd", "lamb") and self.decay_scale == "schedule":
            what = "the gradient" if self.name == "sgd" else "the update that the trust ratio scales"
            raise UserError(
                f"optimizer.decay_scale is 'schedule' with optimizer.name {self.name!r}, whose decay is part of "
                f"{what}; take --optimizer.decay-scale rate, or --optimizer.name adamw"
            )
        if self.name == "lamb" and not self.weight_decay:
            raise UserError(
                "optimizer.name is 'lamb' with optimizer.weight_decay 0; only parameters with weight decay have a "
                "trust ratio, so this would be Adam: give --optimizer.weight-decay 0.02, or --optimizer.name adamw"
            )
        if self.name == "lamb" and self.decay == "all":
            raise UserError(
                "optimizer.name is 'lamb' with optimizer.decay 'all'; biases and the class token would have a trust "
                "ratio, too, which lets them grow by a share of their norm only, and they begin at zero: give "
                "--optimizer.decay kernels, or --optimizer.name adamw"
            )

    @property
    def passes_per_step(self) -> int:
        """The number of forward and backward passes that a step makes over its batch."""
        return 2 if self.sam_rho else 1


def scaled_by_rate(config: OptimizerConfig, *, peak_rate: float) -> OptimizerConfig:
    """Returns the settings with weight decay as a multiple of the learning rate, whose peak is `peak_rate`. Raises
    UserError if the decay follows the schedule and the peak is 0."""
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
    """ZeRO, precision, compilation, and the checks of what DeepSpeed does.

    "auto" precision is decided when a run first starts, and kept when the run resumes on any machine. On a CPU that has
    only AVX2, bf16 takes 8 times as long as fp32. Master weights are always fp32. `compile` and
    `activation_checkpointing` may change when a run resumes. A change of `compile` changes results by rounding, like
    another device, and changes the masks of dropout: bitwise equality needs the same setting.
    """

    zero_stage: Literal[1, 2, 3] = 1
    """What ZeRO shards across ranks: with 1 the optimiser's state, with 2 also gradients, with 3 also weights."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """Precision of weights and activations in forward and backward passes; auto: bf16 where the device computes it
    natively (GPUs of compute capability 8.0 and more, CPUs with AVX512-BF16, AMX or Arm BF16), else fp32."""
    compile: Literal["auto", "on", "tuned", "off"] = "auto"
    """torch.compile of the model's blocks: auto compiles on GPUs with ZeRO-1 and 2 if it works; on requires it, and may
    be given with ZeRO-3, where no GPU has tried it. tuned is on and, on a GPU, sums biases' gradients in other kernels
    and searches for faster variants of all kernels, which no GPU has tried either."""
    activation_checkpointing: Literal["off", "selective", "full", "auto"] = "off"
    """What the backward pass computes again to save memory. selective: the norms, GELUs and sums of Transformer blocks,
    while products and attention are kept. full: all of each block but its input, which costs one more forward pass.
    auto: the first of off, selective and full that fits the memory, even with small micro-batches; but selective
    rather than off if a GPU would get less than 16,384 tokens in a pass, and gets more with it. A checkpoint's choice
    is kept if it fits. The bits stay the same, with selective in compiled blocks up to rounding."""
    deterministic: bool = False
    """On GPUs, use only kernels that compute the same bits every time, which may be slower; CPUs always do."""
    skip_branches: bool = True
    """With stochastic depth, compute a branch only for the images that keep it, in blocks where more than 0.1 of the
    images drop it; if off, it is computed for all and multiplied by 0 for the others: the same up to rounding."""
    overlap: Literal["auto", "on", "off"] = "auto"
    """Add up gradients over ranks during the backward pass (DeepSpeed's overlap_comm), with a second bucket under
    ZeRO-1 and 2; auto: on GPUs, if gradients are checked and the check passes with it. No GPU has run it yet."""
    attention: Literal["auto", "flash", "cudnn", "efficient", "math", "flex", "flash3", "cudnn_packed"] = "auto"
    """Which kernel computes attention on a GPU; auto: the fastest of flash, cudnn, efficient and math, measured when a
    run starts, or PyTorch's own choice if `deterministic` is on. flash3 (FlashAttention-3) and cudnn_packed write the
    gradients of q, k and v into one tensor; both need a package, and no GPU has tried them. A CPU has only one
    kernel."""
    float8: Literal["off", "tensorwise", "rowwise", "rowwise_with_gw_hp"] = "off"
    """Multiply in float8 in the four dense layers of each block, by a recipe of torchao: with a scale for each tensor,
    for each row, or for each row and with gradients of weights in bf16. For GPUs of compute capability 8.9 and more."""
    fused_mlp: bool = False
    """Compute the GELU of each block's MLP, its derivative and the gradient of the MLP's first bias inside the matrix
    products beside them, by kernels of QuACK (`pip install 'patchline[quack]'`), which no GPU has tried. For GPUs of
    compute capability 9.0 and more, in bf16."""
    cuda_graphs: bool = False
    """Launch the kernels of each compiled block together, as a CUDA graph, which saves time if a GPU has few images.
    Needs a GPU, compiled blocks, and steps that all have the same micro-batch and number of tokens."""
    reduce_bucket: Annotated[int, Range(1)] = 50_000_000
    """Gradient elements that ZeRO reduces at once, at least those of a block (with DeepSpeed's default of 5e8, ViT-H/14
    would have a single bucket and nothing to overlap); on a CPU at most MOST_ON_CPU."""
    reduce_precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Precision in which ranks add up their gradients if precision is bf16; auto: fp32, whose error does not grow with
    the number of ranks; bf16 sends half the bytes."""
    check_gradients: Literal["auto", "on", "off"] = "auto"
    """Compare the gradients of a small copy of the model with plain PyTorch's before the first step; auto: on GPUs with
    several ranks or accumulation, and with a DeepSpeed that is allowed by name."""
    allow_deepspeed: str = ""
    """Version of DeepSpeed to accept although it is not tested, such as 0.19.9; it must be the installed one."""

    def __post_init__(self) -> None:
        refuse_wrong_values(self, where="engine.")
        if self.cuda_graphs and (self.zero_stage == 3 or self.compile == "off"):
            raise UserError(
                f"engine.cuda_graphs is on with engine.zero_stage {self.zero_stage} and engine.compile "
                f"{self.compile!r}; allowed: stages 1 and 2 with compiled blocks, whose kernels a graph holds: give "
                "--engine.zero-stage 2 --engine.compile on, or --engine.no-cuda-graphs"
            )
        if self.float8 != "off" and self.zero_stage == 3:
            raise UserError(
                f"engine.float8 is {self.float8!r} with engine.zero_stage 3; allowed: stages 1 and 2 (float8 is fast "
                "in compiled blocks only, and would keep gathered weights until the backward pass): give "
                "--engine.zero-stage 2, or --engine.float8 off"
            )
        if self.fused_mlp and (self.zero_stage == 3 or self.precision == "fp32" or self.float8 != "off"):
            raise UserError(
                f"engine.fused_mlp is on with engine.zero_stage {self.zero_stage}, engine.precision {self.precision} "
                f"and engine.float8 {self.float8!r}; allowed: stages 1 and 2 (stage 3 gathers weights layer by layer, "
                "and here two layers are one), bf16, and float8 'off': give --engine.zero-stage 2 --engine.precision "
                "bf16 --engine.float8 off, or --engine.no-fused-mlp"
            )
        if self.fused_mlp and self.activation_checkpointing == "selective":
            raise UserError(
                "engine.fused_mlp is on with engine.activation_checkpointing 'selective'; allowed: off, full and auto "
                "(fused MLPs keep their GELU, which is most of what selective would save): give "
                "--engine.activation-checkpointing full, or --engine.no-fused-mlp"
            )
        if self.float8 != "off" and self.precision == "fp32":
            raise UserError(
                f"engine.float8 is {self.float8!r} with engine.precision fp32; allowed: bf16, and auto where it takes "
                "bf16: give --engine.precision bf16, or --engine.float8 off"
            )


def reduced_in(config: EngineConfig) -> Literal["bf16", "fp32"]:
    """Returns the precision in which ranks add up their gradients. `config.precision` must be decided."""
    return "bf16" if config.precision == config.reduce_precision == "bf16" else "fp32"


def with_buckets_of(config: EngineConfig, *, on_cpu: bool) -> EngineConfig:
    """Returns the settings with the size of buckets that the engine uses on this kind of device."""
    return replace(config, reduce_bucket=min(config.reduce_bucket, MOST_ON_CPU)) if on_cpu else config


@dataclass(frozen=True, kw_only=True)
class InitialConfig:
    """Weights to start from instead of scratch."""

    weights: str = ""
    """Weights to start from: a run (RUN), a weights folder, a timm or Hugging Face folder, or a .npz, .safetensors or
    .pth file."""
    new_head: bool = True
    """Replace the head with a linear one of zeros, as the paper does, or of model.head_std; if off, all tensors must
    fit."""
    resample: ModeOrNone = "paper"
    """How position embeddings are resampled for another grid: the paper's way, bicubic, timm's, or not at all: then
    they get initial values."""
    patch: Literal["refuse", "resize"] = "refuse"
    """What to do with weights of a ViT whose patches have another size than the model's: refuse them, or resize their
    patch embedding as FlexiViT does (PI-resize), and resample their positions to the new grid."""

    def __post_init__(self) -> None:
        refuse_wrong_values(self, where="initial.")


@dataclass(frozen=True, kw_only=True)
class TeacherConfig:
    """A frozen model whose predictions the trained model learns, beside labels or instead of them (teacher.py)."""

    weights: str = ""
    """Weights of the teacher, in any form that initial.weights takes, with the data's classes; empty: no teacher."""
    target: Literal["soft", "hard"] = "soft"
    """What the model learns of it: its probabilities (soft, as big_vision), or its most probable class (hard, as
    DeiT)."""
    share: Annotated[float, Range(above=0, most=1)] = 1.0
    """The teacher's share of the loss, above 0 to 1; labels have the rest. It is 1 in big_vision, 0.5 in DeiT. It must
    be below 1 with model.distillation_token, where each teaches its own head, and with label smoothing or class
    weights."""
    temperature: Annotated[float, Range(above=0)] = 1.0
    """With soft: what the logits of both are divided by. The loss is multiplied by its square."""
    sha256: str = ""
    """Digest of the teacher: of its tensors, of its model's settings and of the names of its classes. A run fills it
    in, and continues with the same teacher only."""

    def __post_init__(self) -> None:
        refuse_wrong_values(self, where="teacher.")
        others = (self.target, self.share, self.temperature, self.sha256)
        usual = (TeacherConfig.target, TeacherConfig.share, TeacherConfig.temperature, TeacherConfig.sha256)
        if not self.weights and others != usual:
            raise UserError("teacher.target, .share, .temperature and .sha256 say nothing without teacher.weights")
        if self.target == "hard" and self.temperature != 1:
            raise UserError(
                f"teacher.temperature is {self.temperature:g} with teacher.target 'hard', which it does not change; "
                "give --teacher.target soft, or --teacher.temperature 1"
            )


@dataclass(frozen=True, kw_only=True)
class HangConfig:
    """The time limits after which a rank counts as hung. All ranks then write their stacks to RUN/stacks and end with
    exit code 74.

    Time during which a rank's processes are suspended does not count.
    """

    step_seconds: Annotated[float, Range(0, MOST_SECONDS, zero="never")] = 600.0
    """Most seconds that a rank may wait for the data of a step, compute it, or evaluate a batch, or 3 times the longest
    so far if that is more; 0: never look."""
    other_seconds: Annotated[float, Range(0, MOST_SECONDS)] = 3600.0
    """Most seconds for starting, for the first step and the first batch of an evaluation, which may compile, and for
    saving and finishing; at least the seconds of a step."""
    join_seconds: Annotated[float, Range(1, MOST_SECONDS)] = TimeLimits.join_seconds

    def __post_init__(self) -> None:
        refuse_wrong_values(self, where="hang.")


@dataclass(frozen=True, kw_only=True)
class GuardConfig:
    """What to do about loss spikes, and about losses and gradients that are not finite.

    "rewind" goes back to the newest checkpoint that was not trained on the data around the step, and leaves that data
    out.
    """

    on_spike: Literal["off", "warn", "skip", "rewind"] = "off"
    """Loss spikes: warn lists them in RUN/guard.jsonl; skip makes no update from such a loss, and waits for the loss of
    every step before its update; rewind goes back to a checkpoint and skips the data."""
    on_non_finite: Literal["skip", "rewind"] = "skip"
    """Loss or gradient not finite: skip leaves out the update, up to --max-skipped-updates in a row; rewind goes back
    to a checkpoint and skips the data."""
    spike_z: Annotated[float, Range(above=0)] = 10.0
    """Robust z-score from which a loss is a spike: its distance from the median of recent losses, in their noise
    (1.4826 MAD, at least 1 % of the median)."""
    spike_window: Annotated[int, Range(1, _MOST_LOSSES)] = 128
    """Number of latest losses that a loss is compared with."""
    min_history: Annotated[int, Range(1, _MOST_LOSSES)] = 64
    """Number of losses that must precede a loss that is compared; at most --guard.spike-window."""
    skip_steps: Annotated[int, Range(1, 1_000_000)] = 8
    """Steps of data that a rewind leaves out, half of them before the step that caused it."""
    max_rewinds: Annotated[int, Range(0, 100)] = 10
    """Rewinds of the whole run, and at most 3 to one checkpoint, before it ends with exit code 78."""

    def __post_init__(self) -> None:
        refuse_wrong_values(self, where="guard.")
        if self.min_history > self.spike_window:
            raise UserError(
                f"guard.min_history is {self.min_history}, above guard.spike_window, which is {self.spike_window}; "
                "lower --guard.min-history or raise --guard.spike-window"
            )

    @property
    def rewind_steps(self) -> int:
        """The number of steps before a finding that a rewind may have to go back; 0 if nothing is rewound."""
        return self.skip_steps // 2 if "rewind" in (self.on_spike, self.on_non_finite) else 0


@dataclass(frozen=True, kw_only=True)
class LoggersConfig:
    """Services that also get the curves. Credentials are not settings: the services' own libraries take them from the
    environment or from their own files."""

    mlflow: bool = False
    """Send curves and settings to MLflow (needs the extra mlflow)."""
    mlflow_uri: str = ""
    """MLflow's tracking server, such as http://host:5000, without user and password; empty: MLFLOW_TRACKING_URI."""
    wandb: bool = False
    """Send curves and settings to Weights & Biases (needs the extra wandb); WANDB_MODE=offline keeps them in
    RUN/wandb."""
    project: str = "patchline"
    """Name of MLflow's experiment and of W&B's project."""
    name: str = ""
    """The run's name at these services; empty: the name of the run directory."""

    def __post_init__(self) -> None:
        refuse_wrong_values(self, where="loggers.")
        try:
            place = urlsplit(self.mlflow_uri)
        except ValueError as error:
            raise UserError(f"loggers.mlflow_uri is no URI ({error}); allowed: such as http://host:5000") from None
        if "@" in place.netloc:
            raise UserError(
                "loggers.mlflow_uri has a user or password in it, which would be written to RUN/job.yaml; give them as "
                "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD in the environment"
            )
        self._refuse_project()

    def _refuse_project(self) -> None:
        bad = sorted(set(self.project) & set(_NOT_IN_WANDB)) if self.wandb else []
        if not (0 < len(self.project) <= _MOST_PROJECT_CHARACTERS and self.project.isprintable()) or bad:
            but = f" and without any of {_NOT_IN_WANDB}" if self.wandb else ""
            raise UserError(
                f"loggers.project is {shown_value(self.project)}; allowed: a name of 1 to {_MOST_PROJECT_CHARACTERS} "
                f"printable characters{but}"
            )


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """One training run."""

    run_dir: str = ""
    """Folder for everything the run writes; the same command continues the run that is there."""
    data: DataConfig = DataConfig()
    """Samples to train on: their order, and how they are read and augmented."""
    model: ModelConfig = ModelConfig()
    """Model to train."""
    initial: InitialConfig = InitialConfig()
    """Weights to start from."""
    teacher: TeacherConfig = TeacherConfig()
    """Model to learn from."""
    steps: Annotated[int, Range(1, MOST_STEPS)] = 1000
    """Training steps of the whole run."""
    global_batch: Annotated[int, Range(1, _MOST_BATCH)] = 4096
    """Images per step, over all ranks; a multiple of --data.lanes."""
    micro_batch: Annotated[int, Range(0, _MOST_BATCH, zero="the largest that fits")] = 0
    """Images per forward and backward pass of a rank; 0: the most that fit its memory, up to its whole share of the
    global batch."""
    loss: LossName = "softmax"
    """softmax: one label per image; sigmoid: any number of labels."""
    label_smoothing: Annotated[float, Range(0, below=1, zero="off")] = 0.0
    """Share s of a target that goes elsewhere, from 0 (off) to below 1: with softmax evenly to all classes; with
    sigmoid, a target y of a class becomes (1 - s) y + s (1 - y)."""
    class_weights: ClassWeights = "equal"
    """Factor of each image's loss, with softmax: equal: 1; balanced: N / (K n) for a class with n of the N images of K
    classes, so that all classes count equally. Scores are not weighted."""
    clip_norm: Annotated[float, Range(0, zero="off")] = 0.0
    """Largest norm of the gradient, 0 for none (the paper clips at 1, on ImageNet-1k and in fine-tuning only)."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimiser and weight decay."""
    schedule: ScheduleConfig = ScheduleConfig()
    """Learning rate at each step."""
    tokens: TokensConfig = TokensConfig()
    """Fewer tokens per image while training, and patch sizes that change."""
    ema_decay: Annotated[float, Range(0, below=1, zero="off")] = 0.0
    """Decay of the exponential moving average of the weights (EMA, Polyak averaging), which become the run's result; 0
    for none (0.9999 in the paper's ImageNet results, section 4.1); scores during training are measured on the raw
    weights. The average starts at the initial weights, which keep 13.5 % of it after 20,000 steps at 0.9999."""
    ema_warmup: bool = False
    """Let the average forget the initial weights: its decay in update t is at most (1 + t) / (10 + t)."""
    engine: EngineConfig = EngineConfig()
    """ZeRO, precision and compilation."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """When checkpoints are saved, where, and which are kept."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Evaluation during training and at its end."""
    fewshot: FewshotInTraining = FewshotInTraining()
    """Few-shot scores of the representation during training and at its end."""
    hang: HangConfig = HangConfig()
    """When a rank counts as hung."""
    seed: int = 0
    """Seed for everything random in the run."""
    device: Device = "auto"
    """Where to compute; auto: the GPU if there is one, else the CPU; cuda:0 to cuda:7: that GPU, for one rank."""
    threads: Annotated[int, Range(0, MOST_THREADS, zero="the rank's share of the cores")] = 0
    """Threads of each rank, for computing and decoding; 0: OMP_NUM_THREADS if it is set, else the rank's share of
    the cores."""
    log_every_steps: Annotated[int, Range(1, MOST_STEPS)] = 1
    """Steps between two lines of metrics.jsonl and TensorBoard."""
    norms_every_steps: Annotated[int, Range(0, MOST_STEPS, zero="never")] = 100
    """Steps between two lines that also have the norms of gradients and parameters, by group of layers."""
    similarity_every_steps: Annotated[int, Range(0, MOST_STEPS, zero="never")] = 1000
    """Steps between two pictures of how similar the position embeddings are; the last step has one, too."""
    max_skipped_updates: Annotated[int, Range(0)] = 10
    """Updates in a row that may be skipped because their gradient is not finite, before the run stops."""
    guard: GuardConfig = GuardConfig()
    """What to do about loss spikes, and about losses and gradients that are not finite."""
    loggers: LoggersConfig = LoggersConfig()
    """Services that get the curves, too: MLflow, Weights & Biases."""

    @property
    def scored_on(self) -> str:
        """The name of the data on which the shown accuracy is measured: test, or held-out (a part of the training
        data)."""
        return "test" if self.data.held_out.is_none else "held-out"

    @property
    def is_scored(self) -> bool:
        """Whether the model is scored while it is trained."""
        return bool(self.evaluation.url) or not self.data.held_out.is_none

    @property
    def phases(self) -> tuple[TokenPhase, ...]:
        """The parts of the run whose steps have the same number of tokens, in order, with patches of the model's own
        size."""
        return phases_of(self.tokens, self.model, num_steps=self.steps)

    @property
    def with_most_tokens(self) -> "TrainingJob":
        """This job as if all its steps had the smallest of `tokens.patch_sizes`, for which memory must suffice; itself
        if they have the model's."""
        if not self.tokens.patch_sizes:
            return self
        model = with_patch(self.model, min(self.tokens.patch_sizes))
        return replace(self, model=model, tokens=replace(self.tokens, patch_sizes=()))

    @property
    def largest_phase(self) -> TokenPhase:
        """The phase whose steps have the most tokens, for which memory must suffice. Of those with all patches, it is
        the last one, which has the model's image size."""
        return max(self.phases, key=lambda phase: math.inf if phase.num_stay is None else phase.num_stay)

    def __post_init__(self) -> None:
        refuse_wrong_values(self, where="")
        refuse_long_schedule(self.schedule, num_steps=self.steps)
        resize_pixels = self.data.augment.resize_pixels
        refuse_for_tokens(self.tokens, self.model, num_steps=self.steps, resize_pixels=resize_pixels)
        if self.evaluation.also and not self.is_scored:
            raise UserError("evaluation.also says nothing without evaluation.url or data.held_out; give one, too")
        scaled_by_rate(self.optimizer, peak_rate=self.schedule.learning_rate)  # raises UserError for a peak of 0
        self._refuse_for_optimizer()
        if self.engine.float8 != "off":
            self._refuse_for_float8()
        if self.engine.activation_checkpointing == "selective" and self.model.is_bit:
            raise UserError(
                f"engine.activation_checkpointing is 'selective' with model.name {self.model.name!r}; allowed: off, "
                "full and auto (selective is for Transformer blocks, which a ResNet lacks): give "
                "--engine.activation-checkpointing full"
            )
        if self.engine.fused_mlp:
            self._refuse_for_fused_mlp()
        if self.engine.cuda_graphs and self.engine.skip_branches and any(self.model.skipped_rates):
            raise UserError(
                f"engine.cuda_graphs is on with model.stochastic_depth {self.model.stochastic_depth:g} and "
                "engine.skip_branches, whose blocks compute another number of images in each step; allowed: one "
                "number, as a graph has: give --engine.no-skip-branches, or --engine.no-cuda-graphs"
            )
        if self.engine.cuda_graphs:
            self._refuse_graphs_of_sizes()
        if self.data.mixup.binary_targets and self.loss != "sigmoid":
            raise UserError(
                f"data.mixup.binary_targets is on with loss {self.loss!r}, whose targets add up to 1; give --loss "
                "sigmoid, or --data.mixup.no-binary-targets"
            )
        self._refuse_few_draws()
        if self.class_weights != "equal" and self.loss != "softmax":
            raise UserError(
                f"class_weights is {self.class_weights!r} with loss {self.loss!r}, which asks of each class on its "
                "own whether the image has it; give --class-weights equal, or --loss softmax"
            )
        if self.teacher.weights:
            self._refuse_for_teacher()
        if self.model.masked_patches:
            self._refuse_labels()
        if self.engine.attention in ("flex", "cudnn_packed"):
            self._refuse_for_attention()
        if self.optimizer.freeze_backbone:
            self._refuse_for_frozen_backbone()

    def _refuse_for_teacher(self) -> None:
        """Raises UserError for settings with which a teacher's predictions, or the labels, cannot be learned."""
        if self.loss != "softmax":
            raise UserError(
                f"teacher.weights is given with loss {self.loss!r}; a teacher's probabilities are those of softmax: "
                "give --loss softmax"
            )
        if self.model.distillation_token and self.teacher.share == 1:
            raise UserError(
                "teacher.share is 1 with model.distillation_token: the class token's head, which labels teach, would "
                "learn nothing, and predictions are the mean of both heads'; give --teacher.share below 1, such as "
                "0.5 (DeiT), or --model.no-distillation-token"
            )
        given = {
            f"label_smoothing {self.label_smoothing:g}": ("--label-smoothing 0", self.label_smoothing > 0),
            f"class_weights {self.class_weights!r}": ("--class-weights equal", self.class_weights != "equal"),
            "data.label_weights": ("--data.no-label-weights", self.data.label_weights and not self.is_scored),
        }
        flags = {name: flag for name, (flag, is_given) in given.items() if is_given}
        if self.teacher.share == 1 and flags:
            raise UserError(
                f"teacher.share is 1, so the loss is the teacher's alone, and {' and '.join(flags)} would have no "
                f"effect; give {' '.join(flags.values())}, or --teacher.share below 1, such as 0.5 (DeiT)"
            )

    def _refuse_for_frozen_backbone(self) -> None:
        """Raises UserError for engines that need a backward pass in every block, or weights outside the blocks."""
        recomputed = self.engine.activation_checkpointing
        if recomputed in ("selective", "full") or self.engine.fused_mlp:
            raise UserError(
                f"optimizer.freeze_backbone is on with engine.activation_checkpointing {recomputed!r} and "
                f"engine.fused_mlp {self.engine.fused_mlp}; allowed: off, auto, and no fused MLPs, since frozen blocks "
                "have no backward pass: give --engine.activation-checkpointing off --engine.no-fused-mlp"
            )
        if self.engine.compile in ("on", "tuned") and self.engine.zero_stage == 3:
            raise UserError(
                f'engine.compile is "{self.engine.compile}" with engine.zero_stage 3 and optimizer.freeze_backbone; '
                "allowed: stages 1 and 2 (stage 3 gathers frozen weights layer by layer, inside the blocks): give "
                "--engine.zero-stage 2, or --engine.compile off"
            )

    def _refuse_few_draws(self) -> None:
        """Raises UserError if mixup could mix an image with itself, because a lane has too few of a batch's draws."""
        repeats, lanes = self.data.augment.repeats, self.data.lanes
        if self.data.mixup.is_on and repeats > 1 and self.global_batch < 2 * repeats * lanes:
            most = self.global_batch // (2 * repeats)
            fitting = next((f"--data.lanes {n}, or " for n in range(most, 0, -1) if self.global_batch % n == 0), "")
            raise UserError(
                f"data.augment.repeats is {repeats} with mixup, global_batch {self.global_batch} and data.lanes "
                f"{lanes}; allowed: 2 x repeats images or more of each lane in a batch, so that no image is mixed with "
                f"itself: give {fitting}--data.augment.repeats 1"
            )

    def _refuse_for_optimizer(self) -> None:
        """Raises UserError if there are no whole matrices for Muon to update, kernels that Adafactor would factor in
        another way than big_vision, a head of zeros that LAMB could not train, or a stage under which SAM cannot
        publish its weights."""
        if self.optimizer.sam_rho and self.engine.zero_stage > 1:
            raise UserError(
                f"optimizer.sam_rho is {self.optimizer.sam_rho:g} with engine.zero_stage {self.engine.zero_stage}; "
                "allowed: stage 1, the only one under which other weights can be published for the second pass of a "
                "step: give --engine.zero-stage 1, or --optimizer.sam-rho 0"
            )
        if self.optimizer.name == "adafactor" and self.model.resnet:
            raise UserError(
                f"optimizer.name is 'adafactor' with model.name {self.model.name!r}; allowed: Transformers without "
                "a ResNet, whose convolutions it does not factor: give --optimizer.name adamw"
            )
        is_new_head = not self.initial.weights or self.initial.new_head
        if self.optimizer.name == "lamb" and is_new_head and not self.model.head_std and self.optimizer.head_decay:
            raise UserError(
                "optimizer.name is 'lamb' with model.head_std 0; the head would begin as a matrix of zeros, and LAMB's "
                "trust ratio lets a matrix grow by a share of its own norm only, the learning rate: give "
                "--model.head-std 0.02 (as in DeiT III), or --optimizer.name adamw"
            )
        if self.optimizer.name != "muon":
            return
        if self.engine.zero_stage == 3:
            raise UserError(
                "optimizer.name is 'muon' with engine.zero_stage 3; allowed: stages 1 and 2 (Muon updates whole "
                "matrices, and stage 3 cuts every one of them on every rank): give --engine.zero-stage 1"
            )
        if self.model.is_bit:
            raise UserError(
                f"optimizer.name is 'muon' with model.name {self.model.name!r}; allowed: Transformers and hybrids "
                "(Muon updates the matrices of their blocks, and a BiT ResNet has none): give --optimizer.name adamw"
            )

    def _refuse_for_float8(self) -> None:
        """Raises UserError if the model has no blocks, or if its widths are not multiples of 16, which GPUs need for
        float8."""
        what = f"engine.float8 is {self.engine.float8!r} with model.name {self.model.name!r}"
        if self.model.is_bit:
            raise UserError(
                f"{what}; allowed: Transformers and hybrids (float8 is for the dense layers of their blocks, and a BiT "
                "ResNet has none): give --engine.float8 off"
            )
        width, mlp_width = self.model.size.width, self.model.size.mlp_width
        if width % _FLOAT8_MULTIPLE or mlp_width % _FLOAT8_MULTIPLE:
            raise UserError(
                f"{what}, of width {width} and MLP width {mlp_width}; allowed: multiples of {_FLOAT8_MULTIPLE} (GPUs "
                "have no other products of float8): give such widths, or --engine.float8 off"
            )

    def _refuse_for_attention(self) -> None:
        """Raises UserError if the kernel that the job names would not be used, or would be built again for each number
        of images that a branch is computed for."""
        kernel, model = self.engine.attention, self.model
        if model.qk_norm or model.position == "relative" or model.is_rotary:
            raise UserError(
                f"engine.attention is {kernel!r} with model.qk_norm {model.qk_norm} and model.position "
                f"{model.position!r}; allowed: neither qk_norm nor positions within attention (relative, rope2d, "
                "learned_rope2d): give another kernel, or auto"
            )
        if self.engine.skip_branches and any(model.skipped_rates):
            raise UserError(
                f"engine.attention is {kernel!r} with model.stochastic_depth {model.stochastic_depth:g} and "
                "engine.skip_branches, whose blocks compute another number of images in each step, for each of which "
                "this kernel would be built anew; allowed: one number: give --engine.no-skip-branches, or "
                "--engine.attention auto"
            )

    def _refuse_graphs_of_sizes(self) -> None:
        """Raises UserError if steps have several numbers of tokens, each of which would keep CUDA graphs of its own."""
        sizes = sizes_of_steps(self.tokens, self.model, num_steps=self.steps)
        if len(sizes) > 1:
            changing = [name for name in ("patch_sizes", "image_sizes", "whole_steps") if getattr(self.tokens, name)]
            given = " and ".join(f"tokens.{name} {shown_value(getattr(self.tokens, name))}" for name in changing)
            named = [*changing, *(["size_steps"] if self.tokens.image_sizes else [])]
            flags = " and ".join(f"--tokens.{name.replace('_', '-')}" for name in named)
            raise UserError(
                f"engine.cuda_graphs is on with {given}: steps have {len(sizes)} numbers of patches, each with graphs "
                f"of its own, whose memory no plan counts; allowed: one number: leave out {flags}, or give "
                "--engine.no-cuda-graphs"
            )

    def _refuse_for_fused_mlp(self) -> None:
        """Raises UserError if the model has no MLPs, or MLPs with dropout or widths for which QuACK has no kernels."""
        what = f"engine.fused_mlp is on with model.name {self.model.name!r}"
        if self.model.is_bit:
            raise UserError(
                f"{what}; allowed: Transformers and hybrids (a BiT ResNet has no MLPs): give --engine.no-fused-mlp"
            )
        if self.model.dropout:
            raise UserError(
                f"{what} and model.dropout {self.model.dropout:g}; allowed: 0, since dropout would come between GELU "
                "and the next product: give --model.dropout 0, or --engine.no-fused-mlp"
            )
        if self.model.mlp != "plain" or self.model.gelu == "quick" or self.model.inner_norms != "none":
            raise UserError(
                f"{what} and model.mlp {self.model.mlp!r}, model.gelu {self.model.gelu!r}, model.inner_norms "
                f"{self.model.inner_norms!r}; allowed: plain, tanh or exact, and none, for which there are kernels: "
                "give --engine.no-fused-mlp"
            )
        width, mlp_width = self.model.size.width, self.model.size.mlp_width
        if width % _FUSED_MULTIPLE or mlp_width % _FUSED_MULTIPLE:
            raise UserError(
                f"{what}, of width {width} and MLP width {mlp_width}; allowed: multiples of {_FUSED_MULTIPLE}, since "
                "the kernels load 16 bytes at once: give such widths, or --engine.no-fused-mlp"
            )

    def _refuse_labels(self) -> None:
        """Raises UserError if too few patches are corrupted, or if settings about labels are given, which masked
        patches do not use."""
        num_patches = self.model.grid[0] * self.model.grid[1]
        if num_patches < 2 or not self.model.num_corrupted_patches:
            raise UserError(
                f"model.masked_patches with {plural(num_patches, 'patch')} in an image of "
                f"{self.model.image_size} px, of which a share of {self.model.masked_share:g} is corrupted: none; give "
                "a larger --model.masked-share or --model.image-size, or a smaller --model.patch"
            )
        given = {
            "--loss softmax": self.loss != "softmax",
            "--label-smoothing 0": self.label_smoothing > 0,
            "--class-weights equal": self.class_weights != "equal",
            "--data.mixup.alpha 0": self.data.mixup.alpha > 0,
            "--data.mixup.cutmix-alpha 0": self.data.mixup.cutmix_alpha > 0,
            "--data.no-label-weights": self.data.label_weights,
            '--evaluation.url ""': bool(self.evaluation.sets()),
            "--data.held-out.share 0": not self.data.held_out.is_none,
            "--optimizer.no-freeze-backbone": self.optimizer.freeze_backbone,
            '--teacher.weights ""': bool(self.teacher.weights),
        }
        wrong = [flag for flag, is_given in given.items() if is_given]
        if wrong:
            raise UserError(
                "model.masked_patches predicts colours from images alone: it has no labels, no scores on a held-out "
                f"dataset, and trains the whole model; give {' '.join(wrong)} (--fewshot.url gives few-shot scores)"
            )
