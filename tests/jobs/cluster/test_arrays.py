"""Arrays in pieces: every task once, every index below the limit, no more at once than asked for."""

import re

from hypothesis import given
from hypothesis import strategies as st

from jobs.cluster.batch_script import Piece, pieces_of


def tasks_of(piece: Piece) -> list[int]:
    """The tasks that Slurm would run."""
    found: list[int] = []
    for part in piece.array.partition("%")[0].split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return [piece.offset + index for index in found]


def limit_of(piece: Piece) -> int:
    found = re.search(r"%(\d+)$", piece.array)
    return int(found[1]) if found else 0


@given(st.sets(st.integers(0, 300), min_size=1), st.integers(1, 50), st.integers(0, 40))
def test_every_task_is_in_one_piece_within_the_limits(tasks: set[int], most: int, at_once: int) -> None:
    pieces = pieces_of(sorted(tasks), most=most, at_once=at_once)
    assert [task for piece in pieces for task in tasks_of(piece)] == sorted(tasks)
    assert [task for piece in pieces for task in piece.tasks] == sorted(tasks)
    assert all(task - piece.offset < most for piece in pieces for task in piece.tasks)
    if at_once:
        running = [limit_of(piece) for piece in pieces if piece.waits_for is None]
        assert all(running)
        assert sum(running) <= at_once
        for place, piece in enumerate(pieces):
            if piece.waits_for is not None:
                assert piece.waits_for < place
                assert limit_of(piece) <= limit_of(pieces[piece.waits_for]), "a queue never grows wider"


def test_they_are_written_as_slurm_reads_them() -> None:
    (only,) = pieces_of([0, 1, 2, 5], most=1001, at_once=2)
    assert (only.array, only.offset) == ("0-2,5%2", 0)
    first, second = pieces_of([*range(1001), 1500], most=1001)
    assert (first.array, second.array, second.offset) == ("0-1000", "499", 1001)
