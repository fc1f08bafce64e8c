"""Fewer tokens while training: how many patches of each image a step keeps, as a pure function of the step.

PatchDropout (Liu et al., arXiv 2208.07220) trains on a random share of each image's patches. "Scaling Language-Image
Pre-training via Masking" (FLIP, Li et al., arXiv 2212.00794) keeps all patches in a short last part of the run, its
"unmasked tuning", since an evaluation has all patches. The number of patches that stay is rounded as by timm's
layers/patch_dropout.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pipeline.models.config import ModelConfig
from pipeline.training.settings.schedule import MOST_STEPS
from shards.config_values import Range, refuse_wrong_values
from shards.errors import UserError


@dataclass(frozen=True, kw_only=True)
class TokensConfig:
    """Fewer tokens per image while training. Evaluations, checkpoints and exported weights are as without it."""

    patch_dropout: Annotated[float, Range(0, below=1, zero="off")] = 0.0
    """Share of the patches of each image that a step leaves out, after positions are added (PatchDropout; timm's
    patch_drop_rate): N patches become int(N x (1 - share)), at least 1. Class token and registers always stay."""
    whole_steps: Annotated[int, Range(0, MOST_STEPS, zero="none")] = 0
    """Last steps of the run, in which all patches stay (FLIP's unmasked tuning)."""

    def __post_init__(self) -> None:
        refuse_wrong_values(self, where="tokens.")
        if self.whole_steps and not self.patch_dropout:
            raise UserError(
                f"tokens.whole_steps is {self.whole_steps} without tokens.patch_dropout, so all patches stay in all "
                "steps; give --tokens.patch-dropout, such as 0.5, or --tokens.whole-steps 0"
            )


@dataclass(frozen=True, kw_only=True)
class TokenPhase:
    """A part of a run whose steps have the same number of tokens. `end`: the step after its last one, counted from 0.
    `num_stay`: the number of patches of each image that stay; None: all of them."""

    end: int
    num_stay: int | None = None


def phases_of(config: TokensConfig, model: ModelConfig, *, num_steps: int) -> tuple[TokenPhase, ...]:
    """Returns the phases of a run of `num_steps`, in order. The last one ends with the run."""
    if not config.patch_dropout:
        return (TokenPhase(end=num_steps),)
    height, width = model.grid
    dropping = TokenPhase(
        end=num_steps - config.whole_steps, num_stay=num_staying(height * width, config.patch_dropout)
    )
    return (dropping, TokenPhase(end=num_steps)) if config.whole_steps else (dropping,)


def num_staying(num_patches: int, patch_dropout: float) -> int:
    """Returns how many of an image's patches stay, as timm computes it. The product is rounded down as a binary
    fraction, so that 9 of 100 patches stay at 0.9."""
    return max(1, int(num_patches * (1.0 - patch_dropout)))


def phase_at(step: int, phases: Sequence[TokenPhase]) -> TokenPhase:
    """Returns the phase of a step, counted from 0; for later steps, the last phase."""
    return next((phase for phase in phases if step < phase.end), phases[-1])


def refuse_for_tokens(config: TokensConfig, model: ModelConfig, *, num_steps: int) -> None:
    """Raises UserError if the model needs all patches, or the run has no step that leaves any out."""
    if not config.patch_dropout:
        return
    misfits = {
        f"model.name {model.name!r}, a ResNet": model.is_bit,
        "model.masked_patches, whose head predicts every patch": model.masked_patches,
        "model.attention 'axial', which needs whole rows and columns": model.attention == "axial",
        f"model.position {model.position!r}, which is of the sequence of all tokens": model.position
        in ("relative", "rope2d"),
        f"model.position_at {model.position_at!r}, which adds positions of all patches": model.position_at != "input",
    }
    wrong = [words for words, is_wrong in misfits.items() if is_wrong]
    if wrong:
        raise UserError(
            f"tokens.patch_dropout is {config.patch_dropout:g} with {'; '.join(wrong)}; allowed: Transformers and "
            "hybrids of global attention whose positions are added to the input; give --tokens.patch-dropout 0"
        )
    if config.whole_steps >= num_steps:
        raise UserError(
            f"tokens.whole_steps is {config.whole_steps}, not below the {num_steps} steps of the run, so no step would "
            "leave out patches; lower --tokens.whole-steps or raise --steps"
        )
