"""A position: which batch of a stream comes next, and everything that determines its pixels. Pure.

Steps count updates, and schedules follow them; data steps count the batches of the sample order. Both are equal until a
run leaves out data steps, for example those around a loss spike: then step s takes the s-th of the data steps that
are left.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from numbers import Integral
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from shards.config_values import Difference, differences

Setting = bool | int | float | str
_OUTSIDE_DATA = ("seed", "global_batch", "image_size")  # fields of a job, not of its `data`
_WHERE = ("next_step", "data_step", "skipped")
# Fields of a position in which a difference changes no pixel: another libjpeg-turbo or another decoder of Huffman codes
# gives the same ones, which the crop decoder proves when it is loaded. Such a difference is logged, and not refused.
WITHOUT_EFFECT = ("decoder.libjpeg", "decoder.huffman")


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
    """The step that takes this data step, which is not skipped: the number of data steps before it that are not
    skipped."""
    return data_step - sum(min(one.end, data_step) - one.first for one in skipped if one.first < data_step)


def range_around(data_step: int, *, length: int, skipped: Skipped) -> StepRange:
    """`length` data steps around `data_step`, which is not skipped; fewer where they would be negative or skipped
    already."""
    first = data_step - length // 2
    end = first + length
    for one in skipped:
        if one.end <= data_step:
            first = max(first, one.end)
        else:
            end = min(end, one.first)
    return StepRange(first=max(0, first), end=end)


def joined(before: Skipped, others: Sequence[StepRange], *, since: int) -> Skipped:
    """The ranges in `before`, and those in `others` that begin at `since` or later and overlap none of the former, in
    order."""
    found = set(before)
    for other in others:
        if other.first >= since and all(other.end <= one.first or one.end <= other.first for one in found):
            found.add(other)
    return tuple(sorted(found))


@dataclass(frozen=True, kw_only=True)
class StreamPosition:
    """Two positions with equal values are followed by equal batches.

    `next_step` is the step of the next batch, and `data_step` the one whose samples it has: they differ once data steps
    were `skipped` (some of these may lie ahead). `augment`, `randaugment` and `mixup` are settings with the version of
    the code that applies them; what is switched off is None. `decoder` has the versions of the decoding libraries,
    the libjpeg of the crop decoder and what decodes Huffman codes ("" without the crop decoder).
    `dataset` is the dataset's fingerprint, or those of a mix, whose quotas are in `mix`; `subset` and `held_out` say
    which part of it is trained on.
    """

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid")

    next_step: Annotated[int, Field(ge=0)]
    order_version: int
    seed: int
    global_batch: Annotated[int, Field(ge=1)]
    lanes: int
    window_blocks: int
    augment: dict[str, Setting]
    decoder: dict[str, int | str]
    dataset: str | tuple[str, ...]
    subset: dict[str, int | float] | None
    held_out: dict[str, int | float] | None
    randaugment: dict[str, Setting] | None
    mixup: dict[str, Setting] | None
    mix: dict[str, int | tuple[int, ...]] | None
    label_weights: bool
    image_size: int
    data_step: Annotated[int, Field(ge=0)]
    skipped: Skipped

    def __post_init__(self) -> None:
        refuse_disorder(self.skipped)
        expected = data_step_of(self.next_step, self.skipped)
        if self.data_step != expected:
            raise ValueError(f"data_step is {self.data_step}; allowed: {expected}, as follows from what was skipped")

    def at(self, step: int, *, skipped: Skipped | None = None) -> "StreamPosition":
        """The position of the same stream at `step`. `skipped`: None keeps the data steps that are skipped."""
        skipped = self.skipped if skipped is None else skipped
        return replace(self, next_step=step, data_step=data_step_of(step, skipped), skipped=skipped)

    def to_json(self) -> dict[str, Any]:
        """Plain values that JSON and torch.save store."""
        values: dict[str, Any] = _POSITION.dump_python(self, mode="json")
        return values

    def differences(self, now: "StreamPosition", *, allow_other_decoder: bool) -> list[Difference]:
        """The differences between this position and `now`, except for the step. Without any, both streams give the same
        batches."""
        return differences_of(self.to_json(), now, allow_other_decoder=allow_other_decoder)


_POSITION = TypeAdapter(StreamPosition)


def position_from_json(values: Mapping[str, Any]) -> StreamPosition:
    """The position with these plain values. ValueError names the first that is missing or of another type."""
    try:
        return _POSITION.validate_json(json.dumps(dict(values), default=_whole))
    except TypeError as error:
        raise ValueError(str(error)) from error
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error


def _whole(value: object) -> int:
    """Converts a whole number that JSON does not know, such as NumPy's."""
    if isinstance(value, Integral):
        return int(value)
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def differences_of(saved: Mapping[str, Any], now: StreamPosition, *, allow_other_decoder: bool) -> list[Difference]:
    """Like `StreamPosition.differences`, but from plain values that somebody stored and that may be no position at
    all."""
    found = differences(_by_field(saved), _by_field(now.to_json()))
    refused = [change for change in found if not _is_without_effect(change)]
    return [change for change in refused if not (allow_other_decoder and is_of_decoder(change))]


def said_differences(saved: Mapping[str, Any], now: StreamPosition) -> list[Difference]:
    """The differences that change no pixel, so they are logged and not refused."""
    found = differences(_by_field(saved), _by_field(now.to_json()))
    return [change for change in found if _is_without_effect(change)]


def _is_without_effect(change: Difference) -> bool:
    return change.field.removeprefix("data.") in WITHOUT_EFFECT


def is_of_decoder(change: Difference) -> bool:
    """Whether a difference is only in the version of a decoding library."""
    return change.field.startswith("data.decoder.")


def _by_field(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values by the names of the job's fields, without those that say where the stream stands."""
    outside = {name: value for name, value in values.items() if name in _OUTSIDE_DATA}
    inside = {name: value for name, value in values.items() if name not in (*_OUTSIDE_DATA, *_WHERE)}
    return outside | {"data": inside}
