"""Fewer tokens while training: the image size of a step, how many patches of each image stay, and the sizes that its
patches may have, as pure functions of the step.

PatchDropout (Liu et al., arXiv 2208.07220) trains on a random share of each image's patches. "Scaling Language-Image
Pre-training via Masking" (FLIP, Li et al., arXiv 2212.00794) keeps all patches in a short last part of the run, its
"unmasked tuning", since an evaluation has all patches. The number of patches that stay is rounded as by timm's
layers/patch_dropout.py. A run that begins with smaller images ("Fixing the train-test resolution discrepancy", Touvron
et al., arXiv 1906.06423; DeiT III, arXiv 2204.07118) resamples its position embeddings in each pass, as timm does with
dynamic_img_size, but in this project's mode `paper`. Fixed sines and rotary positions are stretched instead
(models/positions.py).

"FlexiViT: One Model for All Patch Sizes" (Beyer et al., CVPR 2023, arXiv 2212.08013; big_vision's trainers/proj/flexi/
train.py and configs/proj/flexivit) draws the patch size of each step. There it is given as the side of the grid, whose
patches cover the image; here sizes are in pixels and must divide the image. Which size a step draws is decided in
gradients.py, and models/patches.py resizes the kernel.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from pipeline.models.config import ModelConfig, fixed_patches
from pipeline.training.settings.schedule import MOST_STEPS
from shards.config_values import Range, refuse_wrong_values, shown_value
from shards.errors import UserError

_MOST_PIXELS = 16_384
_MOST_GRIDS = 24  # torch compiles 64 variants (models/attention.py); stochastic depth and evaluation need more of each
_MOST_PATCH_SIZES = 16  # each is compiled once for each image size


@dataclass(frozen=True, kw_only=True)
class TokensConfig:
    """Fewer tokens per image while training, and patch sizes that change. Evaluations, checkpoints and exported weights
    are as without it."""

    patch_dropout: Annotated[float, Range(0, below=1, zero="off")] = 0.0
    """Share of the patches of each image that a step leaves out, after positions are added (PatchDropout; timm's
    patch_drop_rate): N patches become int(N x (1 - share)), at least 1. Class token and registers always stay."""
    whole_steps: Annotated[int, Range(0, MOST_STEPS, zero="none")] = 0
    """Last steps of the run, in which all patches stay (FLIP's unmasked tuning)."""
    image_sizes: tuple[Annotated[int, Range(1, _MOST_PIXELS)], ...] = ()
    """Image sizes, in pixels, with which the run begins, such as 160 192, before it has the model's; positions
    are resampled or stretched in each pass. Shifts, cutouts and blurs have the same pixels at each size, so they are
    stronger in smaller images."""
    size_steps: tuple[Annotated[int, Range(1, MOST_STEPS)], ...] = ()
    """The last step with each of the image sizes, such as 40000 80000."""
    patch_sizes: tuple[Annotated[int, Range(1, _MOST_PIXELS)], ...] = ()
    """Patch sizes, in pixels, such as 8 16 32, of which each step draws one, all with the same probability (FlexiViT).
    Each must divide every image size of the run. The model's own kernel and position embeddings are resized in each
    pass; evaluations have the model's patch size."""

    def __post_init__(self) -> None:
        refuse_wrong_values(self, where="tokens.")
        if self.whole_steps and not self.patch_dropout:
            raise UserError(
                f"tokens.whole_steps is {self.whole_steps} without tokens.patch_dropout, so all patches stay in all "
                "steps; give --tokens.patch-dropout, such as 0.5, or --tokens.whole-steps 0"
            )
        is_rising = list(self.size_steps) == sorted(set(self.size_steps))
        if len(self.size_steps) != len(self.image_sizes) or not is_rising:
            raise UserError(
                f"tokens.image_sizes is {shown_value(self.image_sizes)} and tokens.size_steps "
                f"{shown_value(self.size_steps)}; allowed: a last step for each size, in rising order, such as "
                "--tokens.image-sizes 160 192 --tokens.size-steps 40000 80000"
            )
        num_sizes = len(self.patch_sizes)
        if num_sizes and (num_sizes != len(set(self.patch_sizes)) or not 2 <= num_sizes <= _MOST_PATCH_SIZES):
            raise UserError(
                f"tokens.patch_sizes is {shown_value(self.patch_sizes)}; allowed: 2 to {_MOST_PATCH_SIZES} different "
                "sizes, such as --tokens.patch-sizes 8 16 32; for one size, give --model.patch instead"
            )


@dataclass(frozen=True, kw_only=True)
class TokenPhase:
    """A part of a run whose steps have the same number of tokens, if patches have one size. `end`: the step after its
    last one, counted from 0. `image_size`: height and width of their images. `num_stay`: the number of patches of each
    image that stay; None: all of them."""

    end: int
    image_size: int
    num_stay: int | None = None


def phases_of(config: TokensConfig, model: ModelConfig, *, num_steps: int) -> tuple[TokenPhase, ...]:
    """Returns the phases of a run of `num_steps` whose patches have the size of `model`, in order. The last one ends
    with the run."""
    first_whole = num_steps - config.whole_steps if config.patch_dropout else 0
    sizes = [*zip(config.size_steps, config.image_sizes, strict=True), (num_steps, model.image_size)]
    found = []
    for end in sorted({first_whole, num_steps, *config.size_steps} - {0}):
        size = next(size for last, size in sizes if end <= last)
        num_stay = None
        if end <= first_whole:
            num_stay = num_staying(num_patches_at(size, model), config.patch_dropout)
        found.append(TokenPhase(end=end, image_size=size, num_stay=num_stay))
    return tuple(found)


def models_of(config: TokensConfig, model: ModelConfig) -> tuple[ModelConfig, ...]:
    """Returns the model with each of the patch sizes that a step may draw; the model alone if all steps have its own.
    A step costs what it costs with such a model, but the weights are always those of the model itself."""
    return tuple(with_patch(model, patch) for patch in config.patch_sizes) or (model,)


def sizes_of_steps(config: TokensConfig, model: ModelConfig, *, num_steps: int) -> dict[int, ModelConfig]:
    """Returns the numbers of patches of an image that the steps of a run have, each with the model at the image and
    patch size of such a step."""
    found = {}
    for each in models_of(config, model):
        for phase in phases_of(config, each, num_steps=num_steps):
            num_patches = num_patches_at(phase.image_size, each) if phase.num_stay is None else phase.num_stay
            found[num_patches] = replace(each, image_size=phase.image_size)
    return found


def with_patch(model: ModelConfig, patch: int | None) -> ModelConfig:
    """Returns the model with another patch size; None: with its own."""
    return model if patch is None else replace(model, patch=patch)


def num_patches_at(image_size: int, model: ModelConfig) -> int:
    """Returns the number of patches of an image with this height and width."""
    return (image_size // model.stride) ** 2


def num_staying(num_patches: int, patch_dropout: float) -> int:
    """Returns how many of an image's patches stay, as timm computes it. The product is rounded down as a binary
    fraction, so that 9 of 100 patches stay at 0.9."""
    return max(1, int(num_patches * (1.0 - patch_dropout)))


def phase_at(step: int, phases: Sequence[TokenPhase]) -> TokenPhase:
    """Returns the phase of a step, counted from 0; for later steps, the last phase."""
    return next((phase for phase in phases if step < phase.end), phases[-1])


def refuse_for_tokens(config: TokensConfig, model: ModelConfig, *, num_steps: int, resize_pixels: int) -> None:
    """Raises UserError if the model needs all patches or images of one size, or if the phases do not fit the run.
    `resize_pixels`: as in AugmentConfig."""
    if config.image_sizes and resize_pixels:
        raise UserError(
            f"data.augment.resize_pixels is {resize_pixels} with tokens.image_sizes, so crops for smaller images would "
            "show less of an image; give --data.augment.resize-pixels 0, which is in proportion"
        )
    _refuse_sizes(config, model, num_steps=num_steps)
    _refuse_patch_sizes(config, model)
    if not config.patch_dropout:
        return
    misfits = {
        f"model.name {model.name!r}, a ResNet": model.is_bit,
        "model.masked_patches, whose head predicts every patch": model.masked_patches,
        "model.attention 'axial', which needs whole rows and columns": model.attention == "axial",
        "model.position 'relative', which is of the sequence of all tokens": model.position == "relative",
        f"model.position_at {model.position_at!r}, which adds positions of all patches": model.position_at != "input",
    }
    wrong = [words for words, is_wrong in misfits.items() if is_wrong]
    if wrong:
        raise UserError(
            f"tokens.patch_dropout is {config.patch_dropout:g} with {'; '.join(wrong)}; allowed: Transformers and "
            "hybrids of global attention whose positions are rotary or added to the input; give "
            "--tokens.patch-dropout 0"
        )
    if config.whole_steps >= num_steps:
        raise UserError(
            f"tokens.whole_steps is {config.whole_steps}, not below the {num_steps} steps of the run, so no step would "
            "leave out patches; lower --tokens.whole-steps or raise --steps"
        )


def _refuse_sizes(config: TokensConfig, model: ModelConfig, *, num_steps: int) -> None:
    """Raises UserError if the model cannot take images of the first sizes, or the run has no step with its own size."""
    if not config.image_sizes:
        return
    sizes = shown_value(config.image_sizes)
    misfits = {
        "model.masked_patches, whose targets have one size": model.masked_patches,
        "model.position 'relative', which is of one sequence": model.position == "relative",
        "model.position_at 'layers', whose tables have one size": model.position_at == "layers",
    }
    wrong = [words for words, is_wrong in misfits.items() if is_wrong]
    if wrong:
        raise UserError(
            f"tokens.image_sizes is {sizes} with {'; '.join(wrong)}; allowed: models that take images of any size; "
            "leave out --tokens.image-sizes and --tokens.size-steps"
        )
    stride = 1 if model.is_bit else model.stride
    if any(size % stride or size > model.image_size for size in config.image_sizes):
        raise UserError(
            f"tokens.image_sizes is {sizes}; allowed: multiples of the patch ({stride} px), up to model.image_size, "
            f"which is {model.image_size}"
        )
    if config.size_steps[-1] >= num_steps:
        raise UserError(
            f"tokens.size_steps is {shown_value(config.size_steps)}; allowed: below the {num_steps} steps of the run, "
            "so that it ends with the model's image size; lower --tokens.size-steps or raise --steps"
        )


def _refuse_patch_sizes(config: TokensConfig, model: ModelConfig) -> None:
    """Raises UserError if the model cannot take patches of these sizes, or if they do not divide the images."""
    if not config.patch_sizes:
        return
    sizes = shown_value(config.patch_sizes)
    if wrong := fixed_patches(model):
        raise UserError(
            f"tokens.patch_sizes is {sizes} with {'; '.join(wrong)}; allowed: Transformers without a ResNet that take "
            "grids of any size; leave out --tokens.patch-sizes"
        )
    images = (*config.image_sizes, model.image_size)
    common = math.gcd(*images)
    if any(common % patch for patch in config.patch_sizes):
        fitting = ", ".join(str(patch) for patch in range(1, common + 1) if common % patch == 0)
        raise UserError(
            f"tokens.patch_sizes is {sizes}; allowed: sizes that divide images of "
            f"{' and '.join(map(str, images))} px: {fitting}"
        )
    num_grids = len(config.patch_sizes) * len(images) * (2 if config.whole_steps else 1)
    if num_grids > _MOST_GRIDS:
        also = ", with and without all patches" if config.whole_steps else ""
        raise UserError(
            f"tokens.patch_sizes is {sizes} with {len(images)} image sizes{also}: {num_grids} numbers of tokens; "
            f"allowed: {_MOST_GRIDS}, since blocks are compiled for each; give fewer sizes"
        )


def shortened_sizes(config: TokensConfig, *, steps: int, before: int) -> TokensConfig:
    """Returns the settings for a run of `steps` in place of `before`. The ends of the sizes move in proportion; sizes
    for which no step is left are dropped."""
    kept: list[tuple[int, int]] = []
    for end, size in zip(config.size_steps, config.image_sizes, strict=True):
        moved = round(end * steps / before)
        if (kept[-1][0] if kept else 0) < moved < steps:
            kept.append((moved, size))
    return replace(config, size_steps=tuple(end for end, _ in kept), image_sizes=tuple(size for _, size in kept))
