"""One shard against the plan: its samples, and all that the plan says about each; a pure check that yields faults."""

from collections.abc import Iterator, Sequence

from shards.images.config import Resize
from shards.images.exif import UPRIGHT
from shards.images.resize import is_untouched
from shards.index import ShardCommit, ShardRows
from shards.packing.write_shard import PlannedSample

Weights = Sequence[Sequence[float] | None]


def check_planned(
    rows: ShardRows, weights: Weights, commit: ShardCommit, planned: Sequence[PlannedSample], *, resize: Resize
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
    found = list(zip(rows.key, rows.source, strict=True))
    for key, source in sorted(set(expected) - set(found)):
        yield f"sample {key} ({source}) of the plan is neither in it nor listed as left out"
    for key, source in sorted(set(found) - set(expected)):
        yield f"sample {key} ({source}) is not what the plan dealt to it"
    if set(found) == set(expected) and found != list(expected):
        yield "its samples are not in the plan's order, or not once each"
    for row, place in enumerate(found):
        if place in expected:
            yield from _differences(rows, row, weights[row], expected[place], resize)


def _differences(
    rows: ShardRows, row: int, weights: Sequence[float] | None, planned: PlannedSample, resize: Resize
) -> Iterator[str]:
    """Where the index differs from the plan. A resized copy has its own bytes; its size follows from the plan's."""
    height, width = int(rows.height[row]), int(rows.width[row])
    pairs: dict[str, tuple[object, object]] = {
        "labels": (tuple(rows.labels[row] or ()), planned.labels),
        "weights": (tuple(weights or ()), planned.weights),
    }
    if is_untouched(planned.header(), resize):
        pairs |= {
            "format": (rows.ext[row], planned.ext),
            "height and width": ((height, width), (planned.height, planned.width)),
            "orientation": (int(rows.orientation[row]), planned.orientation),
            "size": (int(rows.size[row]), planned.size),
            "crc32": (int(rows.crc32[row]), planned.crc32),
        }
    else:
        pairs |= {
            "format": (rows.ext[row], "jpg"),
            "sides": (tuple(sorted((height, width))), _copied_sides(planned, resize)),
            "orientation": (int(rows.orientation[row]), UPRIGHT),
        }
    for name, (here, there) in pairs.items():
        if here != there:
            yield f"sample {rows.key[row]} ({rows.source[row]}) has {name} {here}, by the plan {there}"


def _copied_sides(planned: PlannedSample, resize: Resize) -> tuple[int, int]:
    """The shorter and the longer side of a copy, which may have been turned."""
    short, long = sorted((planned.height, planned.width))
    if not resize.short_side or short <= resize.short_side:
        return short, long
    return resize.short_side, (2 * long * resize.short_side + short) // (2 * short)
