"""Every byte that is wanted is in a range, ranges are whole parts of bounded size, and no part is read twice."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.checkpoints import range_plan
from pipeline.checkpoints.range_plan import FilePieces, PartRange, plan_ranges
from pipeline.models import ModelConfig, shapes_of

SIZES = {"a": 8, "b": 64}


@dataclass(frozen=True, kw_only=True)
class ByteRange:
    """Bytes begin..end-1 of a file."""

    file: str
    begin: int
    end: int


def pieces_at(places: Sequence[ByteRange]) -> FilePieces:
    """These places as pieces, each with a target of its own."""
    names = sorted({place.file for place in places})
    numbers_of = {name: number for number, name in enumerate(names)}
    rows = [(numbers_of[place.file], place.begin, place.end) for place in places]
    files, begins, ends = np.array(rows, dtype=np.int64).reshape(-1, 3).T
    numbers = np.arange(len(rows))
    return FilePieces(names=names, files=files, begins=begins, ends=ends, targets=numbers, ats=np.zeros_like(numbers))


def places() -> st.SearchStrategy[list[ByteRange]]:
    one = st.builds(
        lambda file, begin, length: ByteRange(file=file, begin=begin, end=begin + length),
        st.sampled_from(sorted(SIZES)),
        st.integers(0, 900),
        st.integers(0, 200),
    )
    return st.lists(one, max_size=30)


@given(places(), st.sampled_from([1, 64, 200, 10_000]), st.sampled_from([0, 8, 100, 10_000]))
def test_ranges_hold_all_pieces_and_no_part_twice(pieces: list[ByteRange], most_bytes: int, gap_bytes: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(range_plan, "_GAP_BYTES", gap_bytes)
        found = list(plan_ranges(pieces_at(pieces), SIZES, most_bytes=most_bytes))
    held = [(each.file, part) for each in found for part in range(each.first, each.end)]
    assert len(held) == len(set(held))
    for number, piece in enumerate(pieces):
        size = SIZES[piece.file]
        needed = {(piece.file, byte // size) for byte in range(piece.begin, piece.end)}
        own = [each for each in found if number in each.pieces.tolist()]
        assert needed <= {(each.file, part) for each in own for part in range(each.first, each.end)}
        assert all(each.file == piece.file for each in own)
    for each in found:
        assert each.pieces.size, "a range that nobody wants"
        assert 0 < each.end - each.first <= max(1, most_bytes // SIZES[each.file])


def test_neighbours_are_one_request_and_distant_pieces_are_two() -> None:
    near = [ByteRange(file="a", begin=begin, end=begin + 4) for begin in (0, 2000, 40)]
    distant = ByteRange(file="a", begin=9 << 20, end=(9 << 20) + 4)
    found = list(plan_ranges(pieces_at([*near, distant]), SIZES, most_bytes=1 << 30))
    assert [(each.first, each.end, each.pieces.tolist()) for each in found] == [
        (0, 251, [0, 2, 1]),
        ((9 << 20) // 8, (9 << 20) // 8 + 1, [3]),
    ]


PART, MOST = 1 << 20, 16 << 20
H14 = ModelConfig(name="vit_h14", image_size=224, num_classes=18291)
STATES = 3  # a master and two moments


def zero3_places(num_ranks: int, *, sizes: list[int], slots: range, ranks: range) -> Iterator[tuple[int, ByteRange]]:
    """(tensor, place) of what these ranks have saved in these slots under ZeRO-3: a share of every tensor."""
    for rank in ranks:
        offset = 100_000
        for tensor, size in enumerate(sizes):
            share = -(-size // num_ranks)
            length = max(0, min(share, size - rank * share))
            for slot in range(STATES):
                if slot in slots and length:
                    yield tensor, ByteRange(file=f"rank-{rank:05d}", begin=offset, end=offset + 4 * length)
                offset += 4 * length


def requests(found: list[ByteRange]) -> list[PartRange]:
    return list(plan_ranges(pieces_at(found), {place.file: PART for place in found}, most_bytes=MOST))


def test_the_weights_of_vit_h14_on_512_ranks_take_at_most_2000_requests() -> None:
    """184,000 fragments; in groups of 1 GiB, as fragments.py reads them."""
    sizes = [math.prod(shape) for shape in shapes_of(H14).values()]
    found = list(zero3_places(512, sizes=sizes, slots=range(1), ranks=range(512)))
    assert 150_000 < len(found) < 210_000
    groups, total = [0], 0
    for number, size in enumerate(sizes):
        total += 4 * size
        if total > 1 << 30:
            groups.append(number)
            total = 4 * size
    groups.append(len(sizes))
    counts = [
        len(requests([place for tensor, place in found if low <= tensor < high])) for low, high in pairwise(groups)
    ]
    assert sum(counts) <= 2000, counts


@pytest.mark.parametrize(
    ("ranks", "slots", "most"),
    [
        pytest.param(range(64, 128), range(STATES), 128, id="ZeRO-3, 8 ranks: neighbours' files whole"),
        pytest.param(range(512), range(STATES), 1024, id="one rank: all files whole"),
    ],
)
def test_resuming_on_other_ranks_takes_few_requests(ranks: range, slots: range, most: int) -> None:
    sizes = [math.prod(shape) for shape in shapes_of(H14).values()]
    found = [place for _, place in zero3_places(512, sizes=sizes, slots=slots, ranks=ranks)]
    assert len(ranks) <= len(requests(found)) <= most
