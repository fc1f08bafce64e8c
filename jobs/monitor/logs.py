"""`patchline logs RUN`: prints the last lines of the log of a run's newest job, for all ranks or for one.

The log is in RUN/submit, in the folder of the run's chain, or wherever sbatch's --output put it:

    RUN/submit/*.out            for jobs of `patchline submit`
    FOLDER/chain/jobs/*.out     for jobs of a chain (jobs/chains/advance.py)
    RUN/submit/exits-*/log      one line, the path of a job's log; stage.sbatch writes it for any job
    StdErr of scontrol          for any job that Slurm still knows

srun labels each line with the number of its task, which under `launcher: srun` is the rank. torchrun starts all ranks
of a node as one task, so stage.sbatch then adds the rank after the label, as in `[rank3]: `.
"""

import logging
import re
import shlex
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from jobs import exit_codes
from jobs.arguments import only_word, take_own_flags
from jobs.chains.state import chain_tasks
from jobs.cluster.recorded_jobs import RecordedJob, recorded_in, started_in
from jobs.cluster.slurm import JobFacts, job_facts
from jobs.monitor.ask import refuse_no_run, why_unreadable
from jobs.output import put
from jobs.stages import usage_of
from jobs.submittable import SUBMIT_FOLDER, run_name
from shards.config_values import Range
from shards.errors import InvalidDataError, UserError
from shards.files.local_files import read_local_file, read_tail
from shards.output.terminal import printable_name

_MOST_PATH_BYTES = 4096  # PATH_MAX on Linux
_MOST_FOLDERS = 64
_MOST_ASKED, _ANSWER_SECONDS = 4, 10.0
Wanted = Callable[[bytes], bool]

_MOST_HEAD = 64
_TASK = re.compile(rb" *(\d{1,9}): ?")  # srun --label pads the number to the width of the largest
_NAMED = re.compile(rb" *\d{1,9}: ?\[rank(\d{1,9})\]: ?")
_PID = re.compile(r"pid-\d{1,9}-(\d{1,9})")  # the file of a rank that torchrun started: node, local rank
log = logging.getLogger(__name__)
_TAIL_BYTES = 8 << 20
_POLL_SECONDS = 0.5
_MOST_LINE = 4096


@dataclass(frozen=True, kw_only=True)
class LogsFlags:
    """The flags of the command. If `rank` is None, all lines are shown, including the batch script's."""

    rank: Annotated[int, Range(0, 999_999)] | None = None
    lines: Annotated[int, Range(0, 999_999)] = 100
    follow: bool = False


def run(words: list[str], *, environ: Mapping[str, str]) -> int:
    """Prints the last lines, with control characters escaped. With --follow, continues with new lines until Ctrl-C.
    Raises UserError if there is no log."""
    wanted, others = take_own_flags(LogsFlags, words)
    run_dir = Path(only_word(others, usage=usage_of("logs")))
    refuse_no_run(run_dir)
    if why := why_unreadable(run_dir):
        raise UserError(f"the log is not found: {why}; ask its owner for access")
    path = asked_log(run_dir, environ)
    if path is None:
        folder = shlex.quote(str(run_dir))
        raise UserError(
            f"no log of a job of {folder} is found: a job has one once it has started; "
            f"`patchline status {folder}` says what its jobs wait for"
        )
    try:
        tail = read_tail(path, most_bytes=_TAIL_BYTES)
    except OSError as error:
        raise UserError(f"cannot read {str(path)!r}: {error.strerror}", todo="ask its owner for access") from error
    except InvalidDataError as error:
        raise UserError(f"cannot read {str(path)!r}: {error}") from error
    data = tail.data if tail else b""
    position = tail.num_bytes if tail else 0
    whole, _, half = data.rpartition(b"\n")
    there = whole.split(b"\n") if whole else []
    is_wanted = (lambda _: True) if wanted.rank is None else lines_of_rank(wanted.rank, run_dir)
    lines = [line for line in there if is_wanted(line)]
    if wanted.rank is not None and not lines:
        log.warning("its log has no line of rank %s; without --rank, all lines are shown", wanted.rank)
    put("".join(f"{shown(line)}\n" for line in lines[max(0, len(lines) - wanted.lines) :]))
    if not wanted.follow:
        return exit_codes.DONE
    for line in new_lines(path, position, half):
        if is_wanted(line):
            put(f"{shown(line)}\n")
    return exit_codes.DONE


def shown(line: bytes) -> str:
    """Returns the line, escaped for a terminal and cut to 4 KiB."""
    return printable_name(line[:_MOST_LINE].decode(errors="replace"))


def new_lines(path: Path, position: int, half: bytes) -> Iterator[bytes]:
    """Yields the lines that are written after `position`, and never ends. `half` is the unfinished line before
    `position`. A file that becomes shorter has been replaced, so it is read from its beginning."""
    while True:
        try:
            tail = read_tail(path, most_bytes=_TAIL_BYTES)
        except (OSError, InvalidDataError):
            tail = None
        if tail and tail.num_bytes < position:
            position, half = 0, b""
        if tail and tail.num_bytes > position:
            new = tail.data[-(tail.num_bytes - position) :]
            position = tail.num_bytes
            *whole, half = (half + new).split(b"\n")
            half = half[-_MOST_LINE:]
            yield from whole
        else:
            time.sleep(_POLL_SECONDS)


def lines_of_rank(rank: int, run_dir: Path) -> Wanted:
    """Returns a function that says whether a line of the log is from this rank."""
    if ranks_per_task(run_dir) <= 1:
        return lambda line: _is(rank, _TASK.match(line[:_MOST_HEAD]))
    return lambda line: _is(rank, _NAMED.match(line[:_MOST_HEAD]))


def _is(rank: int, found: "re.Match[bytes] | None") -> bool:
    return found is not None and int(found[1]) == rank


def ranks_per_task(run_dir: Path) -> int:
    """Returns the number of ranks in each srun task of the newest try: 1, unless torchrun started the ranks."""
    with suppress(OSError):
        folders = [path for path in (run_dir / "submit").iterdir() if path.name.startswith("exits-") and path.is_dir()]
        newest = max(folders, key=lambda path: path.stat().st_mtime, default=None)
        names = [path.name for path in newest.iterdir()] if newest else []
        return max((int(match[1]) + 1 for name in names if (match := _PID.fullmatch(name))), default=1)
    return 1


def newest_log(run_dir: Path, jobs: Sequence[JobFacts] = ()) -> Path | None:
    """Returns the run's log that was written last; None if there is no log. `jobs` are the run's jobs that Slurm
    knows."""
    told = [Path(job.log) for job in jobs if job.log.startswith("/")]
    places = [*(run_dir / "submit").glob("*.out"), *told]
    with suppress(UserError):  # the storage of the run or of its chain does not answer
        told += dict(_pointed(run_dir)).values()
        places += [*told, *(task.log for task in chain_tasks(run_dir, told))]
    found = []
    for path in dict.fromkeys(places):
        with suppress(OSError, ValueError):  # the log was deleted meanwhile, or its disk is not mounted here
            status = path.stat()
            if stat.S_ISREG(status.st_mode):
                found.append((status.st_mtime, path))
    return max(found)[1] if found else None


def asked_log(run_dir: Path, environ: Mapping[str, str]) -> Path | None:
    """Returns the newest log. Unlike `newest_log`, asks Slurm for the newest job's log if no file names it."""
    path, started = newest_log(run_dir), started_in(run_dir)
    is_known = path and (
        not started or started[0] in dict(_pointed(run_dir)) or str(started[0]) in re.findall(r"\d+", path.name)
    )
    if is_known or not started:
        return path
    jobs = []
    with suppress(UserError):  # Slurm is not installed here, or does not answer
        jobs = [job_facts(str(number), environ, seconds=_ANSWER_SECONDS) for number in started[:_MOST_ASKED]]
    recorded, run = recorded_in(run_dir / SUBMIT_FOLDER), run_name(str(run_dir))
    own = [
        job
        for job in filter(None, jobs)
        if job.is_recorded(recorded.get(job.number, RecordedJob(job=job.number, name=run)))
    ]
    return newest_log(run_dir, own)


def _pointed(run_dir: Path) -> Iterator[tuple[int, Path]]:
    """Yields the job number and the log path from each usable RUN/submit/exits-*/log of the newest jobs."""
    for job in started_in(run_dir)[:_MOST_FOLDERS]:
        for pointer in sorted((run_dir / "submit").glob(f"exits-{job}-*/log")):
            with suppress(OSError, InvalidDataError, UnicodeDecodeError):
                path = read_local_file(pointer, most_bytes=_MOST_PATH_BYTES + 1).decode().removesuffix("\n")
                if path.startswith("/") and printable_name(path) == path:
                    yield job, Path(path)
