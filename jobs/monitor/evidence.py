"""Gathers the evidence of how a run's last try ended: its log, the exit codes and heartbeats of its ranks, and its
jobs.

Nothing is written here. A file that is missing, half-written or damaged is ignored.
"""

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from jobs.chains.state import refuse_chain
from jobs.cluster.slurm import FINISHED, JobFacts, NodeFacts, nodes_in
from jobs.monitor.ask import is_there
from jobs.monitor.logs import newest_log
from jobs.monitor.status import jobs_of
from jobs.record import Leaves, read_leaves
from jobs.reports.facts import ReportFacts, gather, last_try, line_breaks
from jobs.reports.ls import is_unstarted
from pipeline.runs.facts import SIGNS_OF_A_RUN, read_facts
from pipeline.shared_settings import RECORD_FILE
from pipeline.training.reporting.ledger import last_line
from pipeline.training.watchdog.hang import FOLDER as STACKS
from pipeline.training.watchdog.heartbeat_files import FOLDER as HEARTBEATS
from pipeline.training.watchdog.heartbeat_files import Beat, read_beat
from shards.config_values import whole_number
from shards.errors import InvalidDataError, UserError
from shards.files.local_files import Line, read_local_file, read_tail

_LOG_BYTES = 4 << 20
_MOST_RANKS, _MOST_LINE, _MOST_CODE_BYTES = 4096, 4096, 16
_BEGIN = re.compile(rb"^stage\.sbatch: job \d+, start \d+, try \d+: ")
_EXITS = re.compile(r"exits-\d+-\d+-\d+")
_PLACES = ("job.data.url", "job.evaluation.url", "job.initial.weights", "job.teacher.weights")


@dataclass(frozen=True, kw_only=True)
class LogLine:
    """A line of the log. Numbers begin at 1."""

    number: int
    text: str


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a rank ended, according to the file with its exit code. `path` is relative to the run's folder."""

    rank: int
    code: int
    path: str


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The known facts about a run's last try. `damage`: what is wrong with the run's record. `log`: the lines of its
    log, at most 4 MiB. `log_name`: the log's path, relative to the run's folder if it is inside. `exits`: how each rank
    ended, sorted by time. `beats`: each rank's heartbeat, and by how many seconds it is older than the newest.
    `last_try`: the last line of tries.jsonl. `try_number`: the number of that line. `stacks`: the names of the files
    with stacks. `missing`: fields of the record whose local path does not exist, with the path. `has_lost_checkpoints`:
    the ledger names checkpoints, but the run's folder has none. `complaint`: why Slurm does not answer. `has_slurm`:
    whether Slurm was asked."""

    run_dir: Path
    facts: ReportFacts
    damage: str = ""
    log_name: str = ""
    log: tuple[LogLine, ...] = ()
    exits: tuple[Ended, ...] = ()
    beats: tuple[tuple[Beat, float], ...] = ()
    last_try: Line | None = None
    try_number: int = 0
    stacks: tuple[str, ...] = ()
    missing: tuple[tuple[str, str], ...] = ()
    has_lost_checkpoints: bool = False
    has_stop: bool = False
    has_given_up: bool = False
    free_bytes: int | None = None
    jobs: tuple[JobFacts, ...] = ()
    nodes: tuple[NodeFacts, ...] = ()
    complaint: str = ""
    has_slurm: bool = False

    @property
    def next_job(self) -> JobFacts | None:
        """The newest pending or running job, which will continue the run; None if there is none."""
        return next((job for job in self.jobs if not job.is_finished), None)


def evidence_of(run_dir: Path, environ: Mapping[str, str]) -> Evidence:
    """Returns everything that the folder says and, on a machine with Slurm, what Slurm says. Raises UserError if there
    is no run."""
    if not is_there(run_dir / RECORD_FILE):
        refuse_chain(str(run_dir))
    facts, damage = _gathered(run_dir)
    line, number = last_try(run_dir)
    has_slurm = shutil.which("scontrol", path=environ.get("PATH")) is not None
    jobs, nodes, complaint = _of_slurm(run_dir, line, environ) if has_slurm else ((), (), "")
    path = newest_log(run_dir, jobs)
    free = None
    with suppress(OSError):
        free = shutil.disk_usage(run_dir).free
    beats = _beats(run_dir)
    return Evidence(
        run_dir=run_dir,
        facts=facts,
        damage=damage,
        log_name=str(path.relative_to(run_dir) if path and path.is_relative_to(run_dir) else path or ""),
        log=_log(path) if path else (),
        exits=_exits(run_dir),
        beats=beats,
        last_try=line,
        try_number=number,
        stacks=_stacks(run_dir, beats),
        missing=_missing(run_dir),
        has_lost_checkpoints=_has_lost_checkpoints(run_dir),
        has_stop=is_there(run_dir / "STOP"),
        has_given_up=is_there(run_dir / "submit" / "gave-up"),
        free_bytes=free,
        jobs=jobs,
        nodes=nodes,
        complaint=complaint,
        has_slurm=has_slurm,
    )


def _gathered(run_dir: Path) -> tuple[ReportFacts, str]:
    """Returns the run's facts, and what is wrong with its record. A damaged record is not an error if other files show
    that the folder is a run."""
    if is_unstarted(run_dir):
        return _without_record(run_dir), ""
    try:
        return gather(run_dir, has_whole_curves=False), ""
    except UserError as error:
        is_run = any(is_there(run_dir / name) for name in SIGNS_OF_A_RUN)
        if not is_run or not isinstance(error.__cause__, InvalidDataError):
            raise
        return _without_record(run_dir), str(error.__cause__)


def _without_record(run_dir: Path) -> ReportFacts:
    """Returns the facts of a run whose record is damaged, or not written yet because its first job is pending or ended
    too early."""
    facts = read_facts(run_dir, num_steps=None, is_scored=False)
    return ReportFacts(name=run_dir.resolve().name or str(run_dir), run=facts)


def _of_slurm(
    run_dir: Path, line: Line | None, environ: Mapping[str, str]
) -> tuple[tuple[JobFacts, ...], tuple[NodeFacts, ...], str]:
    """Returns the run's jobs, newest first, the nodes of the last try and of jobs that have not ended, and why Slurm
    does not answer (empty: it does)."""
    try:
        jobs = jobs_of(run_dir, environ)
        lists = {str((line or {}).get("nodes", "")), *(job.nodes for job in jobs if job.state not in FINISHED)}
        nodes = {node.name: node for one in sorted(lists) for node in nodes_in(one, environ)}
    except UserError as error:
        return (), (), str(error)
    return tuple(jobs), tuple(nodes.values()), ""


def _log(path: Path) -> tuple[LogLine, ...]:
    """Returns the log's non-empty lines since the last try began. They keep srun's labels."""
    try:
        tail = read_tail(path, most_bytes=_LOG_BYTES)
        if tail is None:
            return ()
        before = line_breaks(path, tail.num_bytes - len(tail.data))
    except (OSError, InvalidDataError):
        return ()
    lines = tail.data.split(b"\n")
    begin = max((at for at, line in enumerate(lines) if _BEGIN.match(line[:200])), default=0)
    found = enumerate(lines[begin:], before + begin + 1)
    return tuple(
        LogLine(number=number, text=line[:_MOST_LINE].decode(errors="replace")) for number, line in found if line
    )


def _exits(run_dir: Path) -> tuple[Ended, ...]:
    """Returns how each rank of the last try ended, sorted by time."""
    with suppress(OSError):
        folders = [path for path in (run_dir / "submit").iterdir() if _EXITS.fullmatch(path.name)]
        newest = max(folders, key=lambda path: (path / "started").stat().st_mtime, default=None)
        return tuple(one for _, one in sorted(_codes(newest), key=lambda pair: pair[0])) if newest else ()
    return ()


def _codes(folder: Path) -> Iterator[tuple[tuple[int, int], Ended]]:
    for entry in list(os.scandir(folder))[:_MOST_RANKS]:
        rank = whole_number(entry.name.removeprefix("rank-"))
        with suppress(OSError, InvalidDataError, UnicodeDecodeError):
            text = read_local_file(Path(entry.path), most_bytes=_MOST_CODE_BYTES).decode("ascii").strip()
            code = whole_number(text)
            if rank is not None and code is not None:
                path = f"submit/{folder.name}/{entry.name}"
                yield (entry.stat().st_mtime_ns, rank), Ended(rank=rank, code=code, path=path)


def _beats(run_dir: Path) -> tuple[tuple[Beat, float], ...]:
    """Returns the heartbeats of the newest attempt, and by how many seconds each is older than the newest."""
    found = []
    for path in sorted((run_dir / HEARTBEATS).glob("rank-*.json"))[:_MOST_RANKS]:
        with suppress(OSError, ValueError, InvalidDataError):
            beat = read_beat(path)
            found.append((beat, path.stat().st_mtime))
    if not found:
        return ()
    attempt, newest = max(found, key=lambda pair: pair[1])[0].attempt, max(time for _, time in found)
    return tuple((beat, newest - time) for beat, time in found if beat.attempt == attempt)


def _stacks(run_dir: Path, beats: tuple[tuple[Beat, float], ...]) -> tuple[str, ...]:
    """Returns the names of the stack files of the attempt that wrote the heartbeats."""
    if not beats or not beats[0][0].attempt:
        return ()
    names = sorted(path.name for path in (run_dir / STACKS).glob("rank-*.txt"))
    return tuple(f"{STACKS}/{name}" for name in names if name.endswith(f"-attempt-{beats[0][0].attempt}.txt"))


def _missing(run_dir: Path) -> tuple[tuple[str, str], ...]:
    """Returns fields of the record whose local path does not exist, with the path. Relative paths are resolved from the
    current folder, as in the run's own command."""
    leaves = _leaves(run_dir)
    named = [(field.removeprefix("job."), leaves.get(field, "")) for field in _PLACES]
    named = [(field, path) for field, path in named if path not in ("", "null") and "://" not in path]
    return tuple((field, path) for field, path in named if not os.path.lexists(path))


def _has_lost_checkpoints(run_dir: Path) -> bool:
    """Whether the ledger names checkpoints but the run's folder has none. Returns False if --checkpoint.url stores them
    elsewhere, or if the record cannot be read."""
    if _leaves(run_dir).get("job.checkpoint.url", "-") not in ("", "null"):
        return False
    try:
        has_saved = bool(last_line(run_dir))
    except (OSError, InvalidDataError):
        return False
    return has_saved and next((run_dir / "checkpoints").glob("step-*/*/MANIFEST.json"), None) is None


def _leaves(run_dir: Path) -> Leaves:
    """Returns the fields of the record; empty if it cannot be read."""
    with suppress(OSError, InvalidDataError):
        return read_leaves(run_dir / RECORD_FILE)
    return {}
