"""Finds the samples in existing tars by webdataset's rules, so that its readers and ours find the same samples.

The rules are those of `webdataset/tariterators.py`: a member's key and suffix are those of `split_name`; consecutive
members with the same key are one sample; within a sample, the suffix in lower case tells the members apart.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, cast

from shards.config_values import refuse_wrong_values
from shards.errors import ImageRefusedError, UserError
from shards.output.terminal import printable_name
from shards.sources.entry import printable
from shards.sources.tables import written_labels
from shards.sources.tar_members import (
    AmbiguousMemberError,
    BrokenOffTarError,
    DamagedTarError,
    Member,
    is_hidden,
    split_name,
)

NO_LABEL = "no label"
MOST_LABEL_BYTES = 4 << 20  # parsed JSON takes thirty times its size in memory
Unlabeled = Literal["refuse", "keep"]  # what happens to samples without a label
_MOST_SHOWN = 8


class RefusalCause(StrEnum):
    """A cause of a refusal that an option may fix."""

    NO_IMAGE = "no_image"
    NO_LABEL = "no_label"
    UNKNOWN_LABEL = "unknown_label"
    NOT_INTEGER = "not_integer"


class SampleRefusedError(ImageRefusedError):
    """A sample is refused for a cause that an option may fix."""

    def __init__(self, reason: str, cause: RefusalCause) -> None:
        super().__init__(reason)
        self.cause = cause


def cause_of(error: ImageRefusedError) -> RefusalCause | None:
    """Returns the cause of a refusal if an option may fix it, otherwise None."""
    return error.cause if isinstance(error, SampleRefusedError) else None


@dataclass(frozen=True, kw_only=True)
class SampleRules:
    """Which members of a sample are its image and its label."""

    image_keys: tuple[str, ...] = ("jpg", "jpeg", "png", "webp")
    """Suffixes of a sample's image; the first one found is used."""
    label_key: str = "cls"
    """Suffix of the member whose text is the label, an integer or a name."""
    label_field: str = ""
    """Field of the member json that is the label, or a list of labels; empty: `label_key` is used."""
    unlabeled: Unlabeled = "refuse"
    """Whether samples without a label, for example images with captions alone, are quarantined or indexed."""

    def __post_init__(self) -> None:
        refuse_wrong_values(self, where="")
        if not self.image_keys or not all(self.image_keys):
            raise UserError(f"--image-keys is {' '.join(self.image_keys)!r}; give suffixes such as jpg png")
        if not self.label_key:
            raise UserError("--label-key is empty; give the label's suffix, e.g. cls, or --label-field")

    def is_needed(self, name: str) -> bool:
        """Returns whether the bytes of a member have to be read."""
        suffix = (split_name(name) or ("", ""))[1].lower()
        return suffix in self.image_keys or suffix == ("json" if self.label_field else self.label_key)


@dataclass(frozen=True, kw_only=True)
class FoundSample:
    """One sample, or the reason why it is refused. `suffix` and `labels` are as written in the tar."""

    key: str
    name: str
    suffix: str = ""
    image: bytes = b""
    offset: int = 0
    labels: tuple[str, ...] = ()
    reason: str = ""
    cause: RefusalCause | None = None


@dataclass(frozen=True, kw_only=True)
class TarFault:
    """A fault in a tar at which webdataset's readers stop. They either take it for the end of the tar or fail
    (`is_fatal`)."""

    reason: str
    is_fatal: bool


def find_samples(members: Iterable[Member], rules: SampleRules) -> Iterator[FoundSample | TarFault]:
    """Yields the samples and the faults of a tar, in the order of the tar."""
    group: _Group | None = None
    for member in members:
        if isinstance(member.data, DamagedTarError):
            yield from _finished(group, rules)
            group = None
            yield TarFault(reason=str(member.data), is_fatal=isinstance(member.data, BrokenOffTarError))
            continue
        if isinstance(member.data, AmbiguousMemberError):
            yield from _finished(group, rules)
            group = None
            yield TarFault(
                reason=f"{printable(member.name)!r}: {member.data}, where other readers may fail", is_fatal=True
            )
            continue
        split = split_name(member.name)
        if split is None:
            if isinstance(member.data, ImageRefusedError):
                yield FoundSample(key="", name=member.name, reason=str(member.data))
            continue
        if group is None or group.key != split[0]:
            yield from _finished(group, rules)
            group = _Group(key=split[0])
        suffix = split[1].lower()
        if suffix in group.members:
            reason = f"two members {member.name!r} follow each other, where webdataset fails"
            yield TarFault(reason=reason, is_fatal=True)
        group.members[suffix] = member
    yield from _finished(group, rules)


@dataclass(kw_only=True)
class _Group:
    """Consecutive members with the same key."""

    key: str
    members: dict[str, Member] = field(default_factory=dict)


def _finished(group: _Group | None, rules: SampleRules) -> Iterator[FoundSample]:
    if group is None or all(is_hidden(member.name) for member in group.members.values()):
        return
    image_key = next((key for key in rules.image_keys if key in group.members), "")
    name = group.members[image_key].name if image_key else next(iter(group.members.values())).name
    try:
        for member in group.members.values():
            if isinstance(member.data, ImageRefusedError):
                raise member.data
        if not image_key:
            found = printable_name(", ".join(sorted(group.members)[:_MOST_SHOWN]))
            found += f" and {more} more" if (more := len(group.members) - _MOST_SHOWN) > 0 else ""
            raise SampleRefusedError(f"no image: its members are {found}", RefusalCause.NO_IMAGE)
        image = group.members[image_key]
        yield FoundSample(
            key=group.key,
            name=name,
            suffix=name[len(group.key) + 1 :],
            image=cast(bytes, image.data),  # not None, since `is_needed` holds
            offset=image.offset,
            labels=_labels(group.members, rules),
        )
    except ImageRefusedError as error:
        yield FoundSample(key=group.key, name=name, reason=str(error), cause=cause_of(error))


def _labels(members: dict[str, Member], rules: SampleRules) -> tuple[str, ...]:
    wanted = "json" if rules.label_field else rules.label_key
    member = members.get(wanted)
    if member is None and rules.unlabeled == "keep":
        return ()
    if member is None or not isinstance(member.data, bytes):
        raise SampleRefusedError(f"no label: it has no member .{wanted}", RefusalCause.NO_LABEL)
    if len(member.data) > MOST_LABEL_BYTES:
        size = f"its .{wanted} has {len(member.data)} bytes"
        raise SampleRefusedError(f"no label: {size}, allowed: {MOST_LABEL_BYTES}", RefusalCause.NO_LABEL)
    if not rules.label_field:
        values: object = _text(member.data, wanted)
    else:
        try:
            fields = json.loads(_text(member.data, wanted))
        except ValueError as error:
            raise SampleRefusedError(f"no label: its .json is damaged: {error}", RefusalCause.NO_LABEL) from error
        except RecursionError as error:
            raise SampleRefusedError("no label: its .json is nested too deep", RefusalCause.NO_LABEL) from error
        values = fields.get(rules.label_field) if isinstance(fields, dict) else None
    try:
        labels = written_labels(values)
    except ImageRefusedError as error:
        raise SampleRefusedError(str(error), RefusalCause.NO_LABEL) from error
    if not labels and rules.unlabeled == "refuse":
        raise SampleRefusedError(NO_LABEL, RefusalCause.NO_LABEL)
    return labels


def _text(data: bytes, suffix: str) -> str:
    try:
        return data.decode("utf-8-sig")  # Windows programs write a byte order mark, which belongs to no name
    except UnicodeDecodeError as error:
        raise SampleRefusedError(f"no label: its .{suffix} is not UTF-8", RefusalCause.NO_LABEL) from error
