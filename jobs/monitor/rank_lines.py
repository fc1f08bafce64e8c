"""Which rank wrote a line of a job's log.

srun labels each line with the number of its task, which under `launcher: srun` is the rank. A torchrun starts all ranks
of its node as one task: there the line itself must say `[rank3]: ` behind the label, as stage.sbatch makes it.
"""

import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from shards.errors import UserError

Wanted = Callable[[bytes], bool]
_MOST_HEAD = 64
_TASK = re.compile(rb" *(\d{1,9}): ?")  # srun --label pads the number to the width of the largest
_NAMED = re.compile(rb" *\d{1,9}: ?\[rank(\d{1,9})\]: ?")
_UNNAMED = re.compile(rb" *\d{1,9}: ?\d\d:\d\d:\d\d ")  # a message of patchline
_PID = re.compile(r"pid-\d{1,9}-(\d{1,9})")  # of a rank that torchrun started: node, local rank


def lines_of_rank(rank: int, run_dir: Path, lines: Iterable[bytes]) -> Wanted:
    """Whether a line is of the rank. `lines`: those that the log has now. UserError if the log does not tell."""
    if ranks_per_task(run_dir) <= 1:
        return lambda line: _is(rank, _TASK.match(line[:_MOST_HEAD]))
    heads = [line[:_MOST_HEAD] for line in lines]
    last = next((head for head in reversed(heads) if _NAMED.match(head) or _UNNAMED.match(head)), b"")
    if _UNNAMED.match(last):
        raise UserError(
            "this log does not say which rank wrote a line: torchrun started the ranks, and an older stage.sbatch did "
            "not name them; without --rank, all lines are shown, each with the number of its node"
        )
    return lambda line: _is(rank, _NAMED.match(line[:_MOST_HEAD]))


def _is(rank: int, found: "re.Match[bytes] | None") -> bool:
    return found is not None and int(found[1]) == rank


def ranks_per_task(run_dir: Path) -> int:
    """How many ranks each task of srun had in the newest try: 1, unless torchrun started them."""
    with suppress(OSError):
        folders = [path for path in (run_dir / "submit").iterdir() if path.name.startswith("exits-") and path.is_dir()]
        newest = max(folders, key=lambda path: path.stat().st_mtime, default=None)
        names = [path.name for path in newest.iterdir()] if newest else []
        return max((int(match[1]) + 1 for name in names if (match := _PID.fullmatch(name))), default=1)
    return 1
