"""Steps of data that a run leaves out, for example those around a loss spike. Pure.

Steps count updates, and schedules follow them; data steps count the batches of the sample order. Both are equal until
data steps are skipped: then step s takes the data step that is number s of those that are left.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

from pydantic import ConfigDict, Field


@dataclass(frozen=True, kw_only=True, order=True)
class StepRange:
    """Data steps `first` .. `end - 1`. ValueError if there are none."""

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid")

    first: Annotated[int, Field(ge=0)]
    end: Annotated[int, Field(lt=1 << 62)]

    def __post_init__(self) -> None:
        if not 0 <= self.first < self.end:
            raise ValueError(f"skipped data steps {self.first} to {self.end - 1}; allowed: one or more, from 0 on")


Skipped = tuple[StepRange, ...]


def refuse_disorder(skipped: Skipped) -> None:
    """ValueError unless the ranges rise and do not overlap."""
    for before, after in pairwise(skipped):
        if after.first < before.end:
            raise ValueError(f"skipped data steps from {after.first} on follow those to {before.end - 1}")


def data_step_of(step: int, skipped: Skipped) -> int:
    """The data step that `step` takes."""
    for one in skipped:
        if one.first > step:
            break
        step += one.end - one.first
    return step


def step_of(data_step: int, skipped: Skipped) -> int:
    """The step that takes a data step that is not skipped: the number of those before it."""
    return data_step - sum(min(one.end, data_step) - one.first for one in skipped if one.first < data_step)


def range_around(data_step: int, *, length: int, skipped: Skipped) -> StepRange:
    """`length` data steps with `data_step`, which is not skipped, in their middle: as far as they are data steps and
    are not skipped already."""
    first = data_step - length // 2
    end = first + length
    for one in skipped:
        if one.end <= data_step:
            first = max(first, one.end)
        else:
            end = min(end, one.first)
    return StepRange(first=max(0, first), end=end)


def joined(before: Skipped, others: Sequence[StepRange], *, since: int) -> Skipped:
    """The ranges `before`, and those of `others` from the data step `since` on that overlap none of these, in order."""
    found = set(before)
    for other in others:
        if other.first >= since and all(other.end <= one.first or one.end <= other.first for one in found):
            found.add(other)
    return tuple(sorted(found))
