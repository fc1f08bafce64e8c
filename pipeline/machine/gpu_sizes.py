"""The parts of `patchline doctor --gpu`: what each of them measures, and its sizes on a GPU and on a CPU.

The parts up to `resume` should take ten minutes of an H200 and come first (`_FIRST`). An option that costs code is one
row of `_OPTIONS`: its settings, the part that it is compared with, what the comparison settles, and the gain that is
expected. An option that wins less than LEAST_GAIN is to be deleted with its tests.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields, replace
from typing import Any, Literal, Self

from pipeline.models.config import ModelConfig
from pipeline.training.settings.job import EngineConfig, OptimizerConfig, TrainingJob
from shards.errors import UserError

LEAST_GAIN = 0.05
"""The least gain, as a share of images per second, for which an option is kept."""
CODE_SUFFIX, MOST_CODE = ".kernels.py", 4 << 20
"""The end of the name of a file with the code of a part's kernels, and the most characters of it that are kept."""
INDUCTOR = "inductor"
_CONFIGS: dict[str, Any] = {"model": ModelConfig, "engine": EngineConfig, "optimizer": OptimizerConfig}
_RECIPE_CLIP = 1.0  # the clipping of the recipes of ViT-H/14
KEPT_SUMS, LAUNCHED_UPDATES = "kept sums", "updates launched ahead"
_WITHOUT_SETTING = (KEPT_SUMS, LAUNCHED_UPDATES)
# Of a process that measures a step on an H200 with 16 cores: all but compiling and the rounds, with 6 s of profile.
# These are estimates from older parts. Options that tune kernels may compile far longer.
_START_SECONDS, _COMPILE_SECONDS = 28.0, 9.0


@dataclass(frozen=True, kw_only=True)
class Question:
    """What a part settles. `option`: the option whose gain is measured. `beside`: the part that it is compared with.
    `settles`: a sentence. `expects`: the gain that is expected. `is_kept_if_slow`: whether the option stays whatever it
    costs, because it is not there for speed. `is_attention`: whether the option is another kernel of attention."""

    option: str
    beside: str
    settles: str
    expects: str
    is_kept_if_slow: bool = False
    is_attention: bool = False


@dataclass(frozen=True, kw_only=True)
class GpuPart:
    """What one process measures. `batch`: the batch size (0: the largest that fits according to the plan). `ranks`: how
    many processes take part."""

    kind: str
    device: Literal["cuda", "cpu"]
    seconds: float = 5.0
    """How long a step is measured, in five rounds together."""
    model: str = ""
    image_size: int = 224
    batch: int = 0
    compiled: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the job that differ from the usual ones, such as {"engine.attention": "flash"}. A group is `model`,
    `engine`, `optimizer`, or `inductor`, which sets torch._inductor.config."""
    kernel: str = ""
    """The kernel of attention that `auto` takes; empty: the fastest in this process."""
    without: Sequence[str] = ()
    """What is left out although a run always has it, for lack of a setting: names in _WITHOUT_SETTING."""
    shapes: Sequence[Sequence[Any]] = ()
    data_url: str = ""
    num_photographs: int = 256
    megabytes: Sequence[int] = ()
    repeats: int = 20
    ranks: int = 1
    limit_seconds: float = 150.0
    """Time after which the part's processes are ended."""
    expected_seconds: float = 0.0
    """How long the part takes on an H200, as estimated: no H200 has run these parts."""
    question: Question | None = None

    def __post_init__(self) -> None:
        unknown = [name for name in self.without if name not in _WITHOUT_SETTING]
        if unknown:
            raise UserError(f"a part is without {unknown[0]!r}; allowed: {', '.join(_WITHOUT_SETTING)}")
        for name in self.settings:
            group, _, setting = name.partition(".")
            known = [each.name for each in fields(_CONFIGS[group])] if group in _CONFIGS else []
            if group != INDUCTOR and setting not in known:
                groups = ", ".join((*_CONFIGS, INDUCTOR))
                raise UserError(f"a part has the setting {name!r}; allowed: GROUP.SETTING with one of {groups}")
        EngineConfig(**self._of("engine"))
        OptimizerConfig(**self._of("optimizer"))

    def job(self, *, precision: Literal["bf16", "fp32"]) -> TrainingJob:
        """Returns the job whose step is measured. Raises UserError for settings that no run may have."""
        size: dict[str, Any] = {"name": self.model, "image_size": self.image_size, "num_classes": 1000}
        return TrainingJob(
            model=ModelConfig(**size | self._of("model")),
            engine=EngineConfig(**{"precision": precision} | self._of("engine")),
            optimizer=OptimizerConfig(**{"name": "adamw"} | self._of("optimizer")),
            device=self.device,
            clip_norm=_RECIPE_CLIP,
            global_batch=max(1, self.batch),
        )

    def of_inductor(self) -> dict[str, Any]:
        """Returns the settings of torch._inductor.config."""
        return self._of(INDUCTOR)

    def like(self, result: Mapping[str, Any]) -> Self:
        """Returns the part with the micro-batch of `result`, which it is compared with, and with its kernel of
        attention if the settings leave the choice to `auto`, which might choose differently in each process."""
        if self.device == "cpu" or "attention" not in result:
            return self
        is_free = self.settings.get("engine.attention", "auto") == "auto"
        return replace(self, batch=result["micro_batch"], kernel=result["attention"] if is_free else "")

    def measured(self) -> Self:
        """Returns the part without what does not change its result."""
        return replace(self, question=None, limit_seconds=0.0, expected_seconds=0.0)

    def _of(self, group: str) -> dict[str, Any]:
        return {name.partition(".")[2]: value for name, value in self.settings.items() if name.startswith(f"{group}.")}


@dataclass(frozen=True)
class AttentionShape:
    """The shape of the queries, keys and values of one model's attention: [batch, heads, tokens, width]."""

    name: str
    batch: int
    heads: int
    tokens: int
    width: int

    @classmethod
    def from_list(cls, values: Sequence[Any]) -> Self:
        """Creates the shape from a list of its fields."""
        return cls(*values)


@dataclass(frozen=True, kw_only=True)
class _Option:
    """A row of the table of options. `beside`: the part that it is compared with; {least} and {most} are the smallest
    and the largest model. `on_cpu`: whether a CPU can try it. `needs`: what the machine must have. The other fields are
    as in Question and GpuPart."""

    option: str
    beside: str
    settles: str
    expects: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    on_cpu: bool = False
    needs: Literal["", "float8", "fused MLPs", "flash3", "cudnn_packed", "several GPUs"] = ""
    is_kept_if_slow: bool = False


_MOST = "step {most} compiled"
_LEAST_BY_FLASH = "step {least} compiled, flash"
_FEW = "step {least} of 32 images compiled"
_DEPTH = "step {least} compiled, stochastic depth"
_LARGE = "step {most} at 518 px compiled"
_TOGETHER = "step {most} compiled on all GPUs, without overlap"
_FIRST = (
    "attention",
    _MOST,
    f"{_MOST}, flash",
    f"{_MOST}, flash3",
    f"{_MOST}, cudnn_packed",
    *(f"rank {{most}} of {num_images} images compiled" for num_images in (64, 32, 16)),
    _LEAST_BY_FLASH,
    f"{_LEAST_BY_FLASH}, deterministic",
    f"{_MOST}, rowwise float8",
    "resume",
)
_OPTIONS = (
    _Option(
        option="flash",
        beside=_MOST,
        settings={"engine.attention": "flash"},
        is_kept_if_slow=True,
        settles="What attention by flash costs ViT-H/14 beside the kernel that auto chose.",
        expects="-10 %: 66 ms more of 588, as attention alone says",
    ),
    _Option(
        option="flash3",
        beside=_MOST,
        settings={"engine.attention": "flash3"},
        needs="flash3",
        settles="Whether FlashAttention-3, which writes the gradients of q, k and v into one tensor, is worth code.",
        expects="-4 to +5 %: 8 of 588 ms for the copy, but heads of width 80 are computed as if they had 96",
    ),
    _Option(
        option="cudnn_packed",
        beside=_MOST,
        settings={"engine.attention": "cudnn_packed"},
        needs="cudnn_packed",
        settles="Whether cuDNN writing the gradients of q, k and v into one tensor is worth its frontend.",
        expects="+1 %: the copy reads and writes 32 GB, 8 of 588 ms at 4 TB/s; 4 ms of them beside tuned",
    ),
    _Option(
        option="256 tokens",
        beside=_MOST,
        settings={"model.pooling": "average"},
        is_kept_if_slow=True,
        settles="What the class token of ViT-H/14 costs: 257 tokens fill three tiles of 128, 256 fill two.",
        expects="+0.4 to 7 %: attention took 70 of 588 ms, for 9 pairs of tiles in each head instead of 4",
    ),
    _Option(
        option="deterministic",
        beside=_LEAST_BY_FLASH,
        settings={"engine.deterministic": True},
        on_cpu=True,
        is_kept_if_slow=True,
        settles="What deterministic kernels cost where attention is the same.",
        expects="-10 to 0 %: flash sums its gradients in order, and inductor chooses reductions by rule",
    ),
    _Option(
        option="rowwise float8",
        beside=_MOST,
        settings={"engine.float8": "rowwise"},
        needs="float8",
        settles="Whether float8 with a scale for each row is worth torchao and its checks.",
        expects="+10 to 25 %: products are 58 % of the step and could take 0.6 of their time",
    ),
    _Option(
        option="tensorwise float8",
        beside=_MOST,
        settings={"engine.float8": "tensorwise"},
        needs="float8",
        settles="Whether float8 with a scale for each tensor is faster than with one for each row.",
        expects="+15 to 30 %",
    ),
    _Option(
        option="flex",
        beside=_MOST,
        settings={"engine.attention": "flex"},
        settles="Whether attention by PyTorch's compiler is worth its code.",
        expects="-10 to 0 %: cuDNN has the faster kernels on Hopper",
    ),
    _Option(
        option=KEPT_SUMS,
        beside=_MOST,
        without=(KEPT_SUMS,),
        on_cpu=True,
        settles="Whether a block should keep the sums after its residuals (pipeline/models/residuals.py).",
        expects="+1 %: 6 of 588 ms, by the bytes of the lowering",
    ),
    _Option(
        option="coordinate descent",
        beside=_MOST,
        settings={"inductor.coordinate_descent_tuning": True},
        settles="Whether inductor should tune its kernels by coordinate descent, which makes a start longer.",
        expects="+1 to 3 %: kernels beside products and attention are 12 to 22 % of the step",
    ),
    _Option(
        option="tuned",
        beside=_MOST,
        settings={"engine.compile": "tuned"},
        settles="Whether to sum biases in other kernels (pipeline/models/bias_sums.py), with coordinate descent.",
        expects="+2 %: 12 of 588 ms by the bytes of the lowering, and what coordinate descent adds",
    ),
    _Option(
        option="fused MLP",
        beside=_MOST,
        settings={"engine.fused_mlp": True},
        needs="fused MLPs",
        settles="Whether GELU and its gradient inside QuACK's products (pipeline/models/fused_mlp.py) are worth them.",
        expects="+4 to 5 %: 22 to 32 of 588 ms by the lowering, if QuACK's products are as fast as cuBLAS's",
    ),
    _Option(
        option="fused MLP",
        beside=f"{_MOST}, tuned",
        settings={"engine.fused_mlp": True},
        needs="fused MLPs",
        settles="What fused MLPs save where biases are summed in other kernels, too.",
        expects="+3 to 5 %: 16 to 27 of 588 ms by the bytes of the lowering",
    ),
    _Option(
        option="selective",
        beside=_MOST,
        settings={"engine.activation_checkpointing": "selective"},
        is_kept_if_slow=True,
        settles="What recomputing norms and GELU costs ViT-H/14, each at the largest micro-batch that fits.",
        expects="-1 % with as many images, 8 of 588 ms by the bytes of the lowering; 256 instead of 128 on 80 GB",
    ),
    _Option(
        option="selective",
        beside=_LARGE,
        settings={"engine.activation_checkpointing": "selective"},
        is_kept_if_slow=True,
        settles="What it costs or wins at 518 px, where an image keeps 1.1 GB instead of 1.8 GB.",
        expects="-1 to +1 %: 128 images instead of 64 on 192 GB; 64 on both sides on 141 GB",
    ),
    _Option(
        option="CUDA graphs",
        beside=_FEW,
        settings={"engine.cuda_graphs": True},
        settles="Whether launching blocks as CUDA graphs is worth its rules.",
        expects="+50 % and more with 32 images, if the host is still what limits them",
    ),
    _Option(
        option="skipped branches",
        beside=_DEPTH,
        settings={"engine.skip_branches": True},
        on_cpu=True,
        settles="Whether leaving out the branches of images that drop them is worth a graph of its own for each block.",
        expects="+10 to 18 %: a fifth of all branches is dropped",
    ),
    _Option(
        option=LAUNCHED_UPDATES,
        beside=_FEW,
        without=(LAUNCHED_UPDATES,),
        on_cpu=True,
        settles="Whether an update that never waits for the device is worth replacing methods of DeepSpeed.",
        expects="+5 % and more with 32 images, where the device waits for the host",
    ),
    _Option(
        option="overlap",
        beside=_TOGETHER,
        settings={"engine.overlap": "on"},
        needs="several GPUs",
        settles="Whether adding up gradients during the backward pass is worth a second bucket and the check it needs.",
        expects="+2 % in a node of eight H200, where the plan has 13 ms of exchanges in 600; more over slower links",
    ),
)


@dataclass(frozen=True, kw_only=True)
class _Sizes:
    """The sizes on a GPU or on a CPU. A CPU is only used to show that each part works. `few`: the images of one of many
    ranks."""

    models: tuple[str, ...]
    image_size: int
    batch: int
    few: tuple[int, ...]
    seconds: float
    shapes: tuple[AttentionShape, ...]
    megabytes: tuple[int, ...] = field(default=(1, 8, 64, 256))
    num_photographs: int = 256


_SIZES = {
    "cuda": _Sizes(
        models=("vit_b16", "vit_l16", "vit_h14"),
        image_size=224,
        batch=0,
        few=(64, 32, 16),  # of a global batch of 4096 on 64, 128 and 256 GPUs
        seconds=5.0,
        shapes=(
            AttentionShape("ViT-H/14, 257 tokens", 64, 16, 257, 80),
            AttentionShape("ViT-H/14, 256 tokens", 64, 16, 256, 80),
            AttentionShape("ViT-L/16, 197 tokens", 64, 16, 197, 64),
            AttentionShape("ViT-L/16, 196 tokens", 64, 16, 196, 64),
            AttentionShape("ViT-H/14 at 518 px", 8, 16, 1370, 80),
        ),
    ),
    "cpu": _Sizes(
        models=("vit_ti16",),
        image_size=32,
        batch=4,
        few=(2,),
        seconds=0.5,
        shapes=(AttentionShape("ViT-Ti/16 at 32", 4, 3, 5, 64),),
        megabytes=(1,),
        num_photographs=16,
    ),
}


def parts_of(
    device: Literal["cuda", "cpu"], *, num_gpus: int, has: Collection[str] = (), data_url: str = ""
) -> dict[str, GpuPart]:
    """Returns all parts by their names, the most useful ones first. `has`: the keys of `device_facts`'s `lacks` that
    are not missing."""
    sizes = _SIZES[device]
    least, most = sizes.models[0], sizes.models[-1]
    own: dict[str, Any] = {
        "device": device,
        "seconds": sizes.seconds,
        "image_size": sizes.image_size,
        "batch": sizes.batch,
    }
    here = {"", *has, *(["several GPUs"] if num_gpus > 1 else [])}

    def step(model: str, *, is_compiled: bool = True, **more: Any) -> GpuPart:
        expected = _START_SECONDS + sizes.seconds + _COMPILE_SECONDS * is_compiled
        limits = {"expected_seconds": expected, "limit_seconds": 300.0 if is_compiled else 150.0}
        usual: dict[str, Any] = {"kind": "step", "model": model, "compiled": is_compiled}
        return GpuPart(**usual | own | limits | more)

    few = own | {"batch": sizes.batch or 32}  # with few images, launching the kernels takes longer than running them
    shapes = [astuple(shape) for shape in sizes.shapes]
    timed: dict[str, Any] = {"compiled": device == "cuda", "limit_seconds": 300.0, "expected_seconds": 80.0}
    parts = {"attention": GpuPart(kind="attention", shapes=shapes, **own | timed)}
    for model in reversed(sizes.models):
        parts[f"step {model} compiled"] = step(model)
    for num_images in sizes.few:
        parts[f"rank {most} of {num_images} images compiled"] = step(most, kind="rank", batch=num_images)
    by_flash = {"engine.attention": "flash"} if device == "cuda" else {}  # a CPU has one kernel of attention
    parts[_LEAST_BY_FLASH.format(least=least)] = step(least, settings=by_flash)
    parts[_FEW.format(least=least)] = step(least, **few)
    depth = {"model.stochastic_depth": 0.4, "engine.skip_branches": False}
    parts[_DEPTH.format(least=least)] = step(least, settings=depth)
    if device == "cuda":
        parts[_LARGE.format(most=most)] = step(most, image_size=518)
    if num_gpus > 1:
        alone: dict[str, Any] = {"kind": "together", "ranks": num_gpus, "settings": {"engine.overlap": "off"}}
        parts[_TOGETHER.format(most=most)] = step(most, **alone)
    for row in _OPTIONS:
        if row.needs in here and (row.on_cpu or device == "cuda"):
            name, part = _with(row, parts, least=least, most=most)
            parts[name] = part
    for model in reversed(sizes.models):
        parts[f"step {model} eager"] = step(model, is_compiled=False)
    for stage in (1, 2, 3):
        stages = {"engine.zero_stage": stage}
        parts[f"ZeRO-{stage} {least}"] = step(least, kind="zero", is_compiled=False, settings=stages, **few)
    pictures: dict[str, Any] = {"num_photographs": sizes.num_photographs, "batch": max(64, sizes.batch)}
    parts["loader"] = GpuPart(kind="loader", data_url=data_url, expected_seconds=22.0, **own | pictures)
    parts["resume"] = GpuPart(kind="resume", limit_seconds=300.0, expected_seconds=60.0, **own)
    if num_gpus > 1:
        sums: dict[str, Any] = {"ranks": num_gpus, "megabytes": sizes.megabytes}
        parts["exchange"] = GpuPart(kind="exchange", expected_seconds=25.0, **own | sums)
    first = [name.format(least=least, most=most) for name in _FIRST]
    return {name: parts[name] for name in (*first, *parts) if name in parts}


def _with(row: _Option, parts: Mapping[str, GpuPart], *, least: str, most: str) -> tuple[str, GpuPart]:
    """Returns the part that measures an option, with its name."""
    beside = row.beside.format(least=least, most=most)
    part = parts[beside]
    question = Question(
        option=row.option,
        beside=beside,
        settles=row.settles,
        expects=row.expects,
        is_kept_if_slow=row.is_kept_if_slow,
        is_attention="engine.attention" in row.settings,
    )
    kind = "determinism" if "engine.deterministic" in row.settings else part.kind
    changed = replace(
        part,
        kind=kind,
        settings={**part.settings, **row.settings},
        without=row.without,
        question=question,
        expected_seconds=part.expected_seconds + (8.0 if kind == "determinism" else 0.0),
    )
    return f"{beside}, {'without ' if row.without else ''}{row.option}", changed
