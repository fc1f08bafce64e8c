"""One shard against the plan: its samples, and all that the plan says about each; a pure check that yields faults."""

from collections.abc import Iterator, Sequence

from shards.images.config import Resize
from shards.images.resize import is_untouched
from shards.index import IndexRow, ShardCommit
from shards.orientation import UPRIGHT
from shards.packing.write_shard import PlannedSample
from shards.schema.differences import Difference


def check_planned(
    rows: Sequence[IndexRow], commit: ShardCommit, planned: Sequence[PlannedSample], *, resize: Resize
) -> Iterator[str]:
    """The samples that the plan dealt to this shard are here as planned, in its order, or are listed as left out."""
    left_out = {item.position for item in commit.left_out}
    for position in sorted(left_out - {item.position for item in planned}):
        yield f"it lists position {position} as left out, which the plan did not deal to it"
    sources = {item.position: item.source for item in planned}
    for item in commit.left_out:
        if item.source != sources.get(item.position, item.source):
            yield f"it lists position {item.position} as left out under another name than the plan's"
    expected = {
        (f"{item.slot:010d}", item.source): item
        for item in sorted(planned, key=lambda item: item.slot)
        if item.position not in left_out
    }
    found = [(row.key, row.source) for row in rows]
    for key, source in sorted(set(expected) - set(found)):
        yield f"sample {key} ({source}) of the plan is neither in it nor listed as left out"
    for key, source in sorted(set(found) - set(expected)):
        yield f"sample {key} ({source}) is not what the plan dealt to it"
    if set(found) == set(expected) and found != list(expected):
        yield "its samples are not in the plan's order, or not once each"
    for row, place in zip(rows, found, strict=True):
        if place in expected:
            for change in _changes(row, expected[place], resize):
                yield f"sample {row.key} ({row.source}) has {change.field} {change.now}, by the plan {change.before}"


def _changes(row: IndexRow, planned: PlannedSample, resize: Resize) -> list[Difference]:
    """The fields in which the index differs from the plan. A resized copy has its own bytes, and a size that follows
    from the plan's."""
    pairs: dict[str, tuple[object, object]] = {
        "labels": (row.labels, planned.labels),
        "weights": (row.weights, planned.weights),
    }
    if is_untouched(planned.header(), resize):
        pairs |= {
            "format": (row.ext, planned.ext),
            "height and width": ((row.height, row.width), (planned.height, planned.width)),
            "orientation": (row.orientation, planned.orientation),
            "size": (row.size, planned.size),
            "crc32": (row.crc32, planned.crc32),
        }
    else:
        pairs |= {
            "format": (row.ext, "jpg"),
            "sides": (tuple(sorted((row.height, row.width))), _copied_sides(planned, resize)),
            "orientation": (row.orientation, UPRIGHT),
        }
    return [Difference(field=name, before=there, now=here) for name, (here, there) in pairs.items() if here != there]


def _copied_sides(planned: PlannedSample, resize: Resize) -> tuple[int, int]:
    """The shorter and the longer side of a copy, which may have been turned."""
    short, long = sorted((planned.height, planned.width))
    if not resize.short_side or short <= resize.short_side:
        return short, long
    return resize.short_side, (2 * long * resize.short_side + short) // (2 * short)
