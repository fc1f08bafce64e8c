"""How the ranks agree on a save without a collective of its own: each step's sums carry what became of it. Pure.

    writing      each rank says written, failed or overtaken once it knows; the sums decide once all have said one
    committing   all have written; rank 0 says committed, failed or overtaken
    nothing      no save is under way; what late sums still say is of the one before

All ranks see the same sums at the same step, so they are always in the same phase.
"""

from collections.abc import Mapping
from enum import Enum

WRITTEN, FAILED, COMMITTED, OVERTAKEN = "save/written", "save/failed", "save/committed", "save/overtaken"
NAMES = (WRITTEN, FAILED, COMMITTED, OVERTAKEN)


class Phase(Enum):
    """Where a save stands, for all ranks."""

    NOTHING = "no save is under way"
    WRITING = "the ranks write their files"
    COMMITTING = "rank 0 commits"


class Verdict(Enum):
    """What the sums of a step decide."""

    OPEN = "nothing yet"
    WRITTEN = "all files are written"
    COMMITTED = "the checkpoint exists"
    FAILED = "it does not"
    OVERTAKEN = "this attempt is over"


def verdict(phase: Phase, sums: Mapping[str, float], *, num_ranks: int) -> Verdict:
    """What these sums over `num_ranks` ranks decide in this phase."""
    if phase is Phase.WRITING:
        if sums[WRITTEN] + sums[FAILED] + sums[OVERTAKEN] < num_ranks:
            return Verdict.OPEN
        return _bad(sums) or Verdict.WRITTEN
    if phase is Phase.COMMITTING:
        return Verdict.COMMITTED if sums[COMMITTED] else _bad(sums) or Verdict.OPEN
    return Verdict.OPEN


def _bad(sums: Mapping[str, float]) -> Verdict | None:
    return Verdict.OVERTAKEN if sums[OVERTAKEN] else Verdict.FAILED if sums[FAILED] else None
