"""Finds the other members of a sample, such as KEY.txt and KEY.json beside KEY.jpg, in the bytes that were read.

The index has the place of the image alone. The members of a sample lie around it, by webdataset's rule: consecutive
members with the same key are one sample. So the bytes from the end of the image before to the header of the image after
have all of them (Dataset.bytes_around).
"""

import logging
from collections.abc import Collection, Mapping
from contextlib import suppress
from difflib import get_close_matches

from shards.dataset import Dataset
from shards.errors import InvalidDataError, PrintableError
from shards.output.terminal import printable_name
from shards.reading.samples import BYTES_MISSING, MOST_SLICE_BYTES, locate_row
from shards.sources.tar_members import BLOCK_BYTES, read_members, split_name
from shards.storage.ahead import Pieces

log = logging.getLogger(__name__)
_ALIKE = 0.75  # a name that is so much like that of a member is a mistake
_LOOKED_AT = 8  # samples that are searched for a member before a stream begins
Places = dict[str, tuple[int, int]]  # the first byte and the end of each member of a sample, by its suffix


class MembersError(PrintableError):
    """The members of a sample cannot be read."""


def member_places(data: memoryview) -> dict[int, Places]:
    """Returns the members of the samples in a stretch of a tar that begins with a header: for the first byte of every
    member, the places of all members of its sample. Suffixes are in lower case. A damaged stretch has no members."""
    found: dict[int, Places] = {}
    key, sample = None, Places()
    pieces = Pieces(lambda first, end: bytes(data[first:end]), 0, len(data), piece_bytes=BLOCK_BYTES)
    for member in read_members(pieces, wanted=lambda _: True, max_bytes=0, with_data=lambda _: False):
        split = split_name(member.name)
        if split is None or isinstance(member.data, Exception):
            continue
        if split[0] != key:
            key, sample = split[0], {}
        sample.setdefault(split[1].lower(), (member.offset, member.offset + member.size))
        found[member.offset] = sample
    return found


def members_of(dataset: Dataset, sample_id: int) -> Mapping[str, memoryview]:
    """Reads the members of one sample, by their suffixes. Raises MembersError if its tar does not have them, and the
    errors of an unreachable store."""
    shard, _ = locate_row(dataset, sample_id)
    first, end = dataset.bytes_around(sample_id, sample_id)
    if end - first > MOST_SLICE_BYTES:
        raise MembersError(f"the sample and its members have {end - first} bytes; allowed: {MOST_SLICE_BYTES}")
    try:
        data = memoryview(dataset.read_shard(shard, first, end))
    except BYTES_MISSING as error:
        raise MembersError(f"its bytes are not there: {error}") from error
    offset = int(dataset.rows_of(sample_id, 1).offset[0]) - first
    return {suffix: data[begin:stop] for suffix, (begin, stop) in member_places(data).get(offset, {}).items()}


def refuse_no_fields(dataset: Dataset, fields: Collection[str]) -> None:
    """Raises InvalidDataError if none of the first samples has one of the fields, and says which members there are. If
    `fields` is a mapping, whose values stand in for members that are missing, a warning says so instead, unless the
    name is nearly that of a member."""
    if not fields:
        return
    seen = list[set[str]]()
    for number in range(min(_LOOKED_AT, dataset.num_samples)):
        with suppress(MembersError):  # a stream replaces such a sample
            seen.append(set(members_of(dataset, number)))
    for field in fields:
        if seen and not any(field in suffixes for suffixes in seen):
            known = ", ".join(map(printable_name, sorted(set().union(*seen)))) or "none"
            wrong = (
                f"fields has {field!r}, but the first {len(seen)} samples of {dataset.url} have no such member; their "
                f"members are {known}"
            )
            if meant := get_close_matches(field, sorted(set().union(*seen)), n=1, cutoff=_ALIKE):
                raise InvalidDataError(wrong, todo=f"did you mean {meant[0]!r}?")
            if not isinstance(fields, Mapping):
                todo = f"if others have it, give what stands in for it, such as fields={{{field!r}: ''}}"
                raise InvalidDataError(wrong, todo=todo)
            log.warning("%s; %r stands in", wrong, fields[field])
