"""Reads which jobs a run's folder names, and tells them from other jobs that have their numbers.

Slurm uses a number again after it has lost its state, or when its counter starts again. `patchline submit` and the
batch script therefore record more than the number of a job in RUN/submit. No accounting database is needed.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shards.errors import InvalidDataError, UserError
from shards.files.local_files import is_finite, object_in, read_tail
from shards.files.looks import patiently

SUBMISSIONS = "submitted.jsonl"
_RECORDS = {SUBMISSIONS: "unix_time", "tries.jsonl": "unix_began"}  # and the field with the time of a line
_EXITS = re.compile(r"exits-([1-9]\d{0,9})-(\d{1,9})-(\d{1,9})")  # a try's folder: job, start and try
_TAIL_BYTES = 1 << 16
_MOST_NUMBER, _MOST_SECONDS = 1 << 32, 1 << 40
_MOST_RECORDED = 64


@dataclass(frozen=True, kw_only=True)
class RecordedJob:
    """A job that was recorded. `job`: its number `12`, or `12_3` in an array. `name`: a name that Patchline gave it in
    its comment, or an empty string. `user`: the number of the user who submitted it. `submitted`: the submit time that
    Slurm gave it, in Unix seconds. The last two are None if Slurm did not answer when the job was recorded."""

    job: str
    name: str = ""
    user: int | None = None
    submitted: int | None = None

    @property
    def number(self) -> int:
        """The number of the job, or of its array."""
        return int(self.job.partition("_")[0])

    def is_job(self, names: Collection[str], *, user: int | None, submitted: int | None, num_requeues: int) -> bool:
        """Whether a job with this number is the recorded one. `names`: the names in its comment. Slurm's own submit
        times are compared, so no clock of another machine counts. Slurm gives a requeued job a new submit time, which
        counts only with a name: any job with the same number may have been requeued. If neither a name nor the time was
        recorded, no job is the recorded one. Pure."""
        if self.name and self.name not in names:
            return False
        if self.user is not None and user is not None and self.user != user:
            return False
        if self.submitted is None or submitted is None:
            return bool(self.name)
        return submitted == self.submitted or (bool(self.name) and submitted > self.submitted and num_requeues > 0)


def numbers_of(run_dir: Path) -> list[int]:
    """Returns the jobs that RUN/submit mentions, newest first. Damaged lines are skipped, and so are files that this
    user has no access to. Raises UserError if the storage fails for two minutes."""
    times: dict[int, float] = {}
    for began, (number, _, _) in _tries_in(run_dir):
        times.setdefault(number, began)
    for name, field in _RECORDS.items():
        for line in _open_lines(run_dir / "submit" / name):
            if number := _number_in(line):
                seconds: float = line[field] if is_finite(line.get(field)) else 0.0
                times[number] = max(times.get(number, 0.0), seconds)
    return sorted(times, key=lambda number: (times[number], number), reverse=True)


def recorded_in(folder: Path) -> dict[str, RecordedJob]:
    """Returns the jobs that were recorded in this folder or in one of which it is a copy, by their numbers. Returns no
    jobs if this user has no access to their record. Raises UserError if the storage fails for two minutes."""
    return {job.job: job for line in _open_lines(folder / SUBMISSIONS) if (job := _job_in(line))}


def submitted_in(folder: Path) -> list[RecordedJob]:
    """Returns the last 64 jobs that were recorded in a folder such as RUN/submit, newest first. Jobs submitted through
    another path to the folder count. In a copy of a folder, jobs that were submitted in the original do not count.
    Raises UserError if the folder or the record of its jobs cannot be read: a job that is not known about would be
    submitted again."""
    here = _inode(folder)
    lines = [line for line in _lines(folder / SUBMISSIONS) if line.get("folder") == here]
    newest: dict[str, RecordedJob] = {}
    for job in filter(None, map(_job_in, reversed(lines))):
        newest.setdefault(job.job, job)
    return list(newest.values())[:_MOST_RECORDED]


def is_copied(folder: Path) -> bool:
    """Whether this folder is a copy of the one in which the newest job was submitted."""
    folders = [line["folder"] for line in _open_lines(folder / SUBMISSIONS) if "folder" in line]
    return bool(folders) and folders[-1] != _inode(folder)


def _inode(folder: Path) -> int:
    """Returns the inode of a folder, or 0 if there is no folder. Raises UserError if nobody can tell."""
    try:
        return patiently(folder, folder.stat).st_ino
    except (FileNotFoundError, NotADirectoryError):
        return 0
    except OSError as error:
        raise _unknown_jobs(folder, error) from error


def _open_lines(path: Path) -> list[dict[str, Any]]:
    """Returns the same as `_lines`, and no lines if this user has no access to the file."""
    try:
        return _lines(path)
    except UserError as error:
        if isinstance(error.__cause__, PermissionError):
            return []
        raise


def _lines(path: Path) -> list[dict[str, Any]]:
    """Returns the usable lines at the end of a file; no lines if the file is missing. Waits while the storage fails.
    Raises UserError if the file cannot be read."""
    try:
        tail = patiently(path, lambda: read_tail(path, most_bytes=_TAIL_BYTES))
    except (NotADirectoryError, InvalidDataError):
        return []
    except OSError as error:
        raise _unknown_jobs(path, error) from error
    return [found for line in tail.data.split(b"\n") if (found := object_in(line))] if tail else []


def _unknown_jobs(path: Path, error: OSError) -> UserError:
    is_denied = isinstance(error, PermissionError)
    todo = "ask its owner for access" if is_denied else "try again once the storage answers"
    return UserError(f"{str(path)!r} cannot be read ({error.strerror}), so the run's jobs are not known", todo=todo)


def _number_in(line: Mapping[str, Any]) -> int:
    """Returns the job's number in a line, or 0."""
    number = line.get("job")
    return number if type(number) is int and 0 < number < _MOST_NUMBER else 0


def _job_in(line: Mapping[str, Any]) -> RecordedJob | None:
    """Returns the job in a line; None if the line has no usable number."""
    if not (number := _number_in(line)):
        return None
    name = line.get("name")
    return RecordedJob(
        job=str(number),
        name=name if type(name) is str else "",
        user=_whole(line.get("user"), below=_MOST_NUMBER),
        submitted=_whole(line.get("submitted"), below=_MOST_SECONDS),
    )


def _whole(value: object, *, below: int) -> int | None:
    return value if type(value) is int and 0 <= value < below else None


def started_in(run_dir: Path) -> list[int]:
    """Returns the jobs that have started in a run's folder, newest first. Returns no jobs if this user has no access to
    the folder. Raises UserError if the storage fails for two minutes."""
    return list(dict.fromkeys(number for _, (number, _, _) in _tries_in(run_dir)))


def newest_try(run_dir: Path) -> tuple[int, int, int] | None:
    """Returns the job, start and number of the try that began last, or None if none has begun or this user has no
    access to the folder. Raises UserError if the storage fails for two minutes."""
    return next((found for _, found in _tries_in(run_dir)), None)


def _tries_in(run_dir: Path) -> list[tuple[float, tuple[int, int, int]]]:
    """Returns when each try in a run's folder began, with its job, start and number, newest first. stage.sbatch makes a
    folder for each try, and touches a file in it. A job's number says nothing about its age: Slurm may count again."""
    folder = run_dir / "submit"
    try:
        tries = patiently(folder, lambda: [(_began(path), _EXITS.fullmatch(path.name)) for path in folder.iterdir()])
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []
    except OSError as error:
        raise _unknown_jobs(folder, error) from error
    found = [(began, (int(match[1]), int(match[2]), int(match[3]))) for began, match in tries if match]
    return sorted((one for one in found if one[1][0] < _MOST_NUMBER), reverse=True)


def _began(exits: Path) -> float:
    """Returns when a try began, in Unix seconds, or 0 if its folder does not say it."""
    try:
        return (exits / "started").stat().st_mtime
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return 0.0
