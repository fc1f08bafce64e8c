"""Settings that say how training reads its dataset, and which part of it. This module does not load NumPy, so that the
command line starts quickly."""

from dataclasses import dataclass
from typing import Annotated

from shards.config_values import Range, refuse_wrong_values
from shards.errors import UserError


@dataclass(frozen=True, kw_only=True)
class ReadConfig:
    """How bytes are read from a store."""

    connections: Annotated[int, Range(1)] = 8
    """Concurrent reads per rank."""
    hedge_share: Annotated[float, Range(0, 1, zero="none")] = 0.05
    """Second requests for slow reads, as a share of all requests, 0 to 1; 0: none."""

    def __post_init__(self) -> None:
        refuse_wrong_values(self, where="data.reading.")


@dataclass(frozen=True, kw_only=True)
class SubsetConfig:
    """A part of the samples: a range of them or, from that range, a share, a number, or a number per class.

    Samples are chosen by a keyed hash, so with the same seed, a choice of 10 % is contained in a choice of 30 %. A
    share or a number is chosen regardless of the class.
    """

    share: Annotated[float, Range(above=0, most=1)] = 1.0
    """Share of the samples."""
    count: Annotated[int, Range(0, zero="all")] = 0
    """Number of samples; 0: all."""
    per_class: Annotated[int, Range(0, zero="all")] = 0
    """Number of samples of each class; 0: all."""
    first: Annotated[int, Range(0)] = 0
    """First sample of the range, in the packed dataset's random order: 51200 leaves out the samples before it."""
    end: Annotated[int, Range(0, zero="the last sample")] = 0
    """End of the range: the first sample after it; 0: the end of the dataset."""
    seed: Annotated[int, Range(0)] = 0
    """Which samples are chosen; the seed of a run does not change them."""

    def __post_init__(self) -> None:
        refuse_wrong_values(self, where="subset.")
        given = [f"subset.{name}" for name in ("share", "count", "per_class") if self._has(name)]
        if len(given) > 1:
            raise UserError(f"{' and '.join(given)} do not go together; give one of them")
        if self.end and self.end <= self.first:
            raise UserError(f"subset.end is {self.end}; allowed: more than subset.first, {self.first}, or 0 (the end)")

    @property
    def is_whole(self) -> bool:
        """Whether the subset has every sample."""
        return not any(self._has(name) for name in ("share", "count", "per_class", "first", "end"))

    def _has(self, name: str) -> bool:
        return bool(getattr(self, name) != getattr(SubsetConfig, name))


@dataclass(frozen=True, kw_only=True)
class HeldOutConfig:
    """Samples, given as a share or a number, that are held out of training to choose a model or a recipe.

    They are chosen before the subset, so that they are the same for subsets of any size.
    """

    share: Annotated[float, Range(0, below=1, zero="none")] = 0.0
    """Share of the samples to hold out; 0: none. The paper: .01 of ImageNet, .02 of CIFAR, .1 of Pets and Flowers."""
    count: Annotated[int, Range(0, zero="none")] = 0
    """Number of samples to hold out; 0: none."""
    seed: Annotated[int, Range(0)] = 0
    """Which samples are held out; the seed of a run does not change them."""

    def __post_init__(self) -> None:
        refuse_wrong_values(self, where="held_out.")
        if self.share and self.count:
            raise UserError("held_out.share and held_out.count do not go together; give one of them")

    @property
    def is_none(self) -> bool:
        """Whether nothing is held out."""
        return not (self.share or self.count)
