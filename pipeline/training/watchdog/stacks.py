"""RUN/stacks: what every thread of a rank was doing when the run hung."""

import faulthandler
import threading
from pathlib import Path

FOLDER = "stacks"


def stacks_path(run_dir: Path, *, rank: int, attempt: str) -> Path:
    """The file of a rank's stacks; `attempt`: the token of this start, empty while it is not known."""
    return run_dir / FOLDER / f"rank-{rank:05d}-attempt-{attempt or 'starting'}.txt"


def write_stacks(path: Path, *, words: str) -> None:
    """Writes the stacks of all threads, below a line of `words`, and then their names. Raises OSError."""
    path.parent.mkdir(exist_ok=True)
    with path.open("w") as file:
        file.write(f"{words}\n\n")
        file.flush()
        faulthandler.dump_traceback(file=file, all_threads=True)
        names = [f"Thread 0x{thread.ident or 0:016x} is {thread.name}" for thread in threading.enumerate()]
        file.write("\n" + "".join(f"{name}\n" for name in names))
