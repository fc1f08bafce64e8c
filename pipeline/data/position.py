"""A position: which batch of a stream comes next, and everything that determines its pixels. All functions are pure.

Steps count updates, and schedules follow them; data steps count the batches of the sample order. The two numbers are
equal until a run leaves out data steps, for example the data steps around a loss spike. From then on, step s takes the
s-th of the remaining data steps.
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
# Fields of a position in which a difference changes no pixel. Another libjpeg-turbo or another decoder of Huffman codes
# gives the same pixels, which is checked when the crop decoder is loaded. Such a difference is logged, not refused.
WITHOUT_EFFECT = ("decoder.libjpeg", "decoder.huffman")


@dataclass(frozen=True, kw_only=True, order=True)
class StepRange:
    """Data steps `first` .. `end - 1`. Raises ValueError if the range is empty or begins below 0."""

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid")

    first: Annotated[int, Field(ge=0)]
    end: Annotated[int, Field(lt=1 << 62)]

    def __post_init__(self) -> None:
        if not 0 <= self.first < self.end:
            raise ValueError(f"skipped data steps {self.first} to {self.end - 1}; allowed: one or more, from 0 on")


Skipped = tuple[StepRange, ...]


def refuse_disorder(skipped: Skipped) -> None:
    """Raises ValueError unless the ranges are in rising order and do not overlap."""
    for before, after in pairwise(skipped):
        if after.first < before.end:
            raise ValueError(f"skipped data steps from {after.first} on follow those to {before.end - 1}")


def data_step_of(step: int, skipped: Skipped) -> int:
    """Returns the data step whose batch `step` takes."""
    for one in skipped:
        if one.first > step:
            break
        step += one.end - one.first
    return step


# For each image size but the last, the number of steps up to its end, and the size. Steps rise, and no size exceeds the
# last one.
Sizes = tuple[tuple[int, int], ...]


def size_at(step: int, sizes: Sizes, *, last: int) -> int:
    """Returns the image size of a step, counted from 0. `last`: the size after all `sizes`."""
    return next((size for end, size in sizes if step < end), last)


def step_of(data_step: int, skipped: Skipped) -> int:
    """Returns the step that takes this data step, which must not be skipped. It is the number of data steps before it
    that are not skipped."""
    return data_step - sum(min(one.end, data_step) - one.first for one in skipped if one.first < data_step)


def range_around(data_step: int, *, length: int, skipped: Skipped) -> StepRange:
    """Returns a range of `length` data steps around `data_step`, which must not be skipped. The range is shorter if it
    would reach below 0 or into skipped data steps."""
    first = data_step - length // 2
    end = first + length
    for one in skipped:
        if one.end <= data_step:
            first = max(first, one.end)
        else:
            end = min(end, one.first)
    return StepRange(first=max(0, first), end=end)


def joined(before: Skipped, others: Sequence[StepRange], *, since: int) -> Skipped:
    """Returns the ranges in `before`, together with those in `others` that begin at `since` or later and overlap none
    already taken, in rising order."""
    found = set(before)
    for other in others:
        if other.first >= since and all(other.end <= one.first or one.end <= other.first for one in found):
            found.add(other)
    return tuple(sorted(found))


@dataclass(frozen=True, kw_only=True)
class StreamPosition:
    """The position of a stream.

    Streams at equal positions yield equal batches. `next_step` is the step of the next batch, and `data_step` is the
    data step whose samples that batch has. They differ once data steps have been `skipped` (some of these may lie
    ahead). `augment`, `randaugment` and `mixup` hold the settings and the version of the code that applies them;
    RandAugment and mixup are None if they are off. `decoder` holds the versions of the decoding libraries, the libjpeg
    of the crop decoder and what decodes Huffman codes ("" without the crop decoder). `dataset` is the dataset's
    fingerprint or, for a mix, the fingerprints of all its datasets, whose quotas are in `mix`. `subset` and `held_out`
    say which part is trained on.
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
        """Returns the position of the same stream at `step`. `skipped`: the data steps to skip; None keeps the present
        ones."""
        skipped = self.skipped if skipped is None else skipped
        return replace(self, next_step=step, data_step=data_step_of(step, skipped), skipped=skipped)

    def to_json(self) -> dict[str, Any]:
        """Returns the position as plain values, which JSON and torch.save can store."""
        values: dict[str, Any] = _POSITION.dump_python(self, mode="json")
        return values

    def differences(self, now: "StreamPosition", *, allow_other_decoder: bool) -> list[Difference]:
        """Returns the differences between this position and `now`, except for the step and for those that change no
        pixel. `allow_other_decoder` also leaves out the decoder's. If there are none without it, both streams give the
        same batches."""
        return differences_of(self.to_json(), now, allow_other_decoder=allow_other_decoder)


_POSITION = TypeAdapter(StreamPosition)


def position_from_json(values: Mapping[str, Any]) -> StreamPosition:
    """Returns the position with these plain values. Raises ValueError, which names the first wrong or missing value."""
    try:
        return _POSITION.validate_json(json.dumps(dict(values), default=_whole))
    except TypeError as error:
        raise ValueError(str(error)) from error
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error


def _whole(value: object) -> int:
    """Converts a whole number of a type that JSON does not know, such as NumPy's. Raises TypeError for other types."""
    if isinstance(value, Integral):
        return int(value)
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def differences_of(saved: Mapping[str, Any], now: StreamPosition, *, allow_other_decoder: bool) -> list[Difference]:
    """Returns the same as `StreamPosition.differences`, but for stored plain values, which need not form a valid
    position."""
    found = differences(_by_field(saved), _by_field(now.to_json()))
    refused = [change for change in found if not _is_without_effect(change)]
    return [change for change in refused if not (allow_other_decoder and is_of_decoder(change))]


def said_differences(saved: Mapping[str, Any], now: StreamPosition) -> list[Difference]:
    """Returns the differences that change no pixel, which are logged and not refused."""
    found = differences(_by_field(saved), _by_field(now.to_json()))
    return [change for change in found if _is_without_effect(change)]


def _is_without_effect(change: Difference) -> bool:
    return change.field.removeprefix("data.") in WITHOUT_EFFECT


def is_of_decoder(change: Difference) -> bool:
    """Returns whether a difference is in the decoder: a library's version, or what decodes Huffman codes."""
    return change.field.startswith("data.decoder.")


def _by_field(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values under the names of the job's fields, without the values that say how far the stream has
    come."""
    outside = {name: value for name, value in values.items() if name in _OUTSIDE_DATA}
    inside = {name: value for name, value in values.items() if name not in (*_OUTSIDE_DATA, *_WHERE)}
    return outside | {"data": inside}
