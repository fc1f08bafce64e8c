"""The parts of `patchline doctor --gpu`: what each of them measures, and its sizes on a GPU and on a CPU."""

from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from itertools import product
from typing import Any, Literal, Self


@dataclass(frozen=True, kw_only=True)
class GpuPart:
    """What one process measures. `batch`: the batch size (0: the largest that fits according to the plan). `ranks`: how
    many processes take part."""

    kind: str
    device: Literal["cuda", "cpu"]
    seconds: float = 8.0
    model: str = ""
    image_size: int = 224
    batch: int = 0
    compiled: bool = False
    deterministic: bool = False
    float8: Literal["off", "tensorwise", "rowwise"] = "off"
    cuda_graphs: bool = False
    zero_stage: Literal[1, 2, 3] = 1
    shapes: Sequence[Sequence[Any]] = ()
    data_url: str = ""
    num_photographs: int = 256
    megabytes: Sequence[int] = ()
    repeats: int = 20
    ranks: int = 1
    limit_seconds: float = 150.0
    """Time after which the part's processes are ended."""


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
        seconds=8.0,
        shapes=(
            AttentionShape("ViT-B/16 at 224", 64, 12, 197, 64),
            AttentionShape("ViT-L/16 at 224", 64, 16, 197, 64),
            AttentionShape("ViT-H/14 at 224", 64, 16, 257, 80),
            AttentionShape("ViT-H/14 at 518", 8, 16, 1370, 80),
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
    device: Literal["cuda", "cpu"], *, num_gpus: int, has_float8: bool = False, data_url: str = ""
) -> dict[str, GpuPart]:
    """Returns all parts by their names, the most useful ones first. `has_float8`: whether the GPU and torchao support
    float8."""
    sizes = _SIZES[device]
    least, most = sizes.models[0], sizes.models[-1]
    own: dict[str, Any] = {
        "device": device,
        "seconds": sizes.seconds,
        "image_size": sizes.image_size,
        "batch": sizes.batch,
    }
    attention = GpuPart(kind="attention", limit_seconds=300.0, shapes=[astuple(shape) for shape in sizes.shapes], **own)
    parts = {"attention": attention}
    for num_images in sizes.few:
        parts[f"rank {most} of {num_images} images compiled"] = GpuPart(
            kind="rank", model=most, compiled=True, limit_seconds=300.0, **own | {"batch": num_images}
        )
    parts |= {
        f"step {model} {'compiled' if compiled else 'eager'}": GpuPart(
            kind="step", model=model, compiled=compiled, **own
        )
        for model in sizes.models
        for compiled in (False, True)
    }
    scalings: tuple[Literal["tensorwise", "rowwise"], ...] = ("tensorwise", "rowwise")
    for model, scaling in product((least, most), scalings if has_float8 else ()):
        parts[f"step {model} compiled, {scaling} float8"] = GpuPart(
            kind="step", model=model, compiled=True, float8=scaling, **own
        )
    if device == "cuda":  # with few images, launching the kernels takes longer than running them
        few = own | {"batch": 32}
        for is_on in (False, True):
            name = f"step {least} of 32 images compiled{', CUDA graphs' if is_on else ''}"
            parts[name] = GpuPart(kind="step", model=least, compiled=True, cuda_graphs=is_on, **few)
    parts[f"deterministic {least} compiled"] = GpuPart(
        kind="determinism", model=least, compiled=True, deterministic=True, **own
    )
    of_zero = own | {"batch": sizes.batch or 32}
    stages: tuple[Literal[1, 2, 3], ...] = (1, 2, 3)
    for stage in stages:
        parts[f"ZeRO-{stage} {least}"] = GpuPart(kind="zero", model=least, zero_stage=stage, **of_zero)
    of_loader = own | {"batch": max(64, sizes.batch)}
    parts["loader"] = GpuPart(kind="loader", data_url=data_url, num_photographs=sizes.num_photographs, **of_loader)
    parts[f"profile {most} compiled"] = GpuPart(kind="profile", model=most, compiled=True, **own)
    if num_gpus > 1:
        parts["exchange"] = GpuPart(kind="exchange", ranks=num_gpus, megabytes=sizes.megabytes, **own)
    parts["resume"] = GpuPart(kind="resume", limit_seconds=300.0, **own)
    return parts
