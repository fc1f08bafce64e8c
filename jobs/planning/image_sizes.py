"""The part of `patchline plan` about image sizes: operations and memory of an image over its resolution.

The products of attention grow with the square of the tokens, and so with the fourth power of the side (of axial
attention, with the third); all else in a layer grows with the tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.table import Table

from jobs.planning.nodes import few, plain_table
from jobs.settings.models import PlanJob
from pipeline.models.activations import activations_of
from pipeline.models.flops import attention_flops, forward_flops
from pipeline.training.fitting.memory import pass_of
from shards.errors import UserError


@dataclass(frozen=True, kw_only=True)
class AtSize:
    """An image of this side in pixels: the tokens of a transformer (0: a BiT ResNet), the operations of a forward pass,
    those of them in the products of attention, and the bytes that training keeps and needs for it."""

    image_size: int
    num_tokens: int
    forward_flops: int
    attention_flops: int
    activation_bytes: int


def at_sizes(job: PlanJob) -> list[AtSize]:
    """The cost at each of `--image-sizes`, in ascending order. UserError for one that is no multiple of the patch."""
    training = job.training
    model = replace(training.model, num_classes=training.model.num_classes or max(1, job.num_classes))
    stride = 1 if model.is_bit else model.stride
    how = pass_of(training, is_on_gpu=True, element_bytes=4 if training.engine.precision == "fp32" else 2)
    found = []
    for size in sorted(job.image_sizes):
        if size % stride:
            lower, upper = size // stride * stride, -(-size // stride) * stride
            sizes = f"{lower} or {upper}" if lower else str(upper)
            raise UserError(f"--image-sizes has {size}, not a multiple of the patch ({stride} px); take {sizes}")
        at = replace(model, image_size=size)
        kept = activations_of(at, how)
        num_tokens = 0 if at.is_bit else at.num_prefix_tokens + at.grid[0] * at.grid[1]
        found.append(
            AtSize(
                image_size=size,
                num_tokens=num_tokens,
                forward_flops=forward_flops(at),
                attention_flops=attention_flops(at),
                activation_bytes=kept.image_bytes + kept.working_bytes,
            )
        )
    return found


def size_table(job: PlanJob, found: Sequence[AtSize]) -> Table:
    """A row for each image size, at most as wide as a terminal."""
    kind = "fp32" if job.training.engine.precision == "fp32" else "bf16"
    recomputed = " and activation checkpointing" if job.training.engine.activation_checkpointing else ""
    model = job.training.model
    is_axial = not model.is_bit and model.attention == "axial"
    growth = "tokens times those of a row and a column" if is_axial else "square of the tokens"
    caption = (
        f"attention: the share of its two products, which grow with the {growth}. memory: what training "
        f"keeps and needs for one image more, in {kind}{recomputed}, before torch.compile saves some of it."
    )
    table = plain_table("over the image size", caption, ("px", "tokens", "GFLOP", "times", "attention", "memory MB"))
    for at in found:
        table.add_row(
            f"{at.image_size:,}",
            f"{at.num_tokens:,}" if at.num_tokens else "-",
            few(at.forward_flops / 1e9),
            f"{at.forward_flops / found[0].forward_flops:.2f}",
            f"{at.attention_flops / at.forward_flops:.1%}",
            few(at.activation_bytes / 1e6),
        )
    return table
