"""Where the log of a run is: in RUN/submit, in the folder of its chain, or wherever sbatch's --output put it.

RUN/submit/*.out            of `patchline submit`
FOLDER/chain/jobs/*.out     of a chain's jobs (jobs/chains/advance.py)
RUN/submit/exits-*/log      one line, the path of a job's log: written by stage.sbatch, whoever submitted it
StdErr of scontrol          while Slurm remembers the job
"""

import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from jobs.chains.state import chain_tasks
from jobs.cluster.slurm import JobFacts, job_facts, started_in
from shards.errors import InvalidDataError, UserError
from shards.local_file import read_local_file
from shards.output.terminal import printable_name

_MOST_PATH_BYTES = 4096  # PATH_MAX of Linux
_MOST_FOLDERS = 64
_MOST_ASKED, _ANSWER_SECONDS = 4, 10.0


def newest_log(run_dir: Path, jobs: Sequence[JobFacts] = ()) -> Path | None:
    """The log of the run that was written last; None if there is none. `jobs`: what Slurm said of its jobs."""
    pointed = dict(_pointed(run_dir))
    told = [*pointed.values(), *(Path(job.log) for job in jobs if job.log.startswith("/"))]
    places = [*(run_dir / "submit").glob("*.out"), *told, *(task.log for task in chain_tasks(run_dir, told))]
    found = []
    for path in dict.fromkeys(places):
        with suppress(OSError, ValueError):  # deleted meanwhile, or of a machine whose folders are not here
            status = path.stat()
            if stat.S_ISREG(status.st_mode):
                found.append((status.st_mtime, path))
    return max(found)[1] if found else None


def asked_log(run_dir: Path, environ: Mapping[str, str]) -> Path | None:
    """Like `newest_log`, but asks Slurm where the newest job's log is if the files do not tell."""
    path, started = newest_log(run_dir), started_in(run_dir)
    is_known = path and (not started or started[0] in dict(_pointed(run_dir)) or _names(path, started[0]))
    if is_known or not started:
        return path
    jobs = []
    with suppress(UserError):  # there is no Slurm here, or it does not answer
        jobs = [job_facts(str(number), environ, seconds=_ANSWER_SECONDS) for number in started[:_MOST_ASKED]]
    return newest_log(run_dir, [job for job in jobs if job])


def _names(path: Path, job: int) -> bool:
    return str(job) in re.findall(r"\d+", path.name)


def _pointed(run_dir: Path) -> Iterator[tuple[int, Path]]:
    """The job and the path of each pointer that can be used, of the newest jobs."""
    for job in started_in(run_dir)[:_MOST_FOLDERS]:
        for pointer in sorted((run_dir / "submit").glob(f"exits-{job}-*/log")):
            with suppress(OSError, InvalidDataError, UnicodeDecodeError):
                path = read_local_file(pointer, most_bytes=_MOST_PATH_BYTES + 1).decode().removesuffix("\n")
                if path.startswith("/") and printable_name(path) == path:
                    yield job, Path(path)
