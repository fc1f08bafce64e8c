"""Writes the batch script of a job: the #SBATCH lines, the cluster's variables and `setup:`, the command, and the body
of slurm/stage.sbatch.

A job array is cut into pieces that Slurm accepts, since MaxArraySize limits the index. A `%` in `--array` limits how
many tasks run at once.
"""

import math
import shlex
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from jobs.cluster.container import words_in_container
from jobs.cluster.settings import ClusterConfig, asked_seconds
from jobs.output import private_mode
from jobs.recipes import photos
from jobs.settings.runs import GPU_NAMES
from jobs.stages import WITH_SMOKE
from shards.output.quantities import plural
from shards.output.terminal import printable_name

_BODIES = (Path(__file__).parents[1] / "stage.sbatch", Path(__file__).parents[2] / "slurm" / "stage.sbatch")
_PLANNED = (
    *("--steps", "--global-batch", "--micro-batch", "--model.", "--engine.", "--data.lanes"),
    *("--optimizer.", "--tokens.", "--teacher."),  # a second pass, fewer tokens, another model's passes
)
_ADAPTING = (*photos.RECIPES, *photos.FINETUNE_RECIPES)  # the model and the steps follow what only the job reads
_BODY_BEGINS = "# Run one stage of Patchline"


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Part of an array, in which index `i` stands for the task `offset + i`. `array`: the value of `--array`.
    `waits_for`: the position of the piece that must end before this one starts, or None if this one need not wait."""

    offset: int
    array: str
    tasks: tuple[int, ...]
    waits_for: int | None


def pieces_of(tasks: Sequence[int], *, most: int, at_once: int = 0) -> list[Piece]:
    """Cuts tasks, given in order and without repeats, into pieces of `most` indexes (0 to most-1).

    The pieces share the `at_once` tasks that may run at the same time (0: all). If there are more pieces than that,
    they form `at_once` queues, and each piece starts after the one before it in its queue.
    """
    groups: dict[int, list[int]] = {}
    for task in tasks:
        groups.setdefault(task // most, []).append(task)
    lanes = min(at_once, len(groups)) if at_once else len(groups)
    pieces = []
    for place, (number, group) in enumerate(sorted(groups.items())):
        offset = number * most
        share = at_once // lanes + (place % lanes < at_once % lanes) if at_once else 0
        limit = f"%{share}" if share else ""
        pieces.append(
            Piece(
                offset=offset,
                array=_ranges([task - offset for task in group]) + limit,
                tasks=tuple(group),
                waits_for=place - lanes if place >= lanes else None,
            )
        )
    return pieces


def tasks_in(job: str) -> list[range]:
    """Returns the task numbers in a job id as squeue shows it, such as `12_3` or `12_[0-3,7%2]`. Returns an empty list
    for `12`."""
    tasks = job.partition("_")[2].strip("[]").partition("%")[0]
    ends = [part.partition("-") for part in tasks.split(",")]
    known = [(first, last or first) for first, _, last in ends]
    return [range(int(first), int(last) + 1) for first, last in known if _is_number(first) and _is_number(last)]


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 10


def _ranges(numbers: Sequence[int]) -> str:
    """Returns ascending numbers in Slurm's format: 0-3,7."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


@dataclass(frozen=True, kw_only=True)
class Request:
    """One job. `words`: the arguments of patchline, the stage first. `folder`: where the script, the log and the
    records go. `chdir`: the folder that relative paths in the arguments start from. Both paths are absolute."""

    words: tuple[str, ...]
    name: str
    comment: str
    nodes: int
    time_limit: str
    folder: Path
    chdir: Path
    has_ranks: bool = True
    """Whether the job has a process per GPU, and the nodes to itself. Otherwise it is one process."""
    cpus: int = 0
    """CPUs of each process. 0 stands for the cluster's `cpus_per_rank` or, in a job without ranks, for 1."""
    dependency: str = ""
    array: str = ""
    """The value of --array, such as 0-3,7%2. In an array, `tail` chooses each task's arguments."""
    tail: tuple[str, ...] = ()
    """Lines of shell that follow the arguments in the script."""
    state: str = ""
    """Folder for the records of a stage without a run directory."""


def stage_body() -> str:
    """Reads slurm/stage.sbatch from this installation or checkout."""
    return next(path for path in _BODIES if path.is_file()).read_text()


def batch_script(request: Request, cluster: ClusterConfig, *, body: str) -> str:
    """Returns the text of a script for sbatch. `body`: the text of slurm/stage.sbatch, whose head is replaced."""
    shown = shlex.join(["patchline", *request.words]).replace("\n", "\\n")
    lines = [
        "#!/usr/bin/env bash",
        *head_lines(request, cluster),
        "",
        "# Written by `patchline submit`, for the command:",
        f"#   {shown}",
        f"# To submit it by hand: sbatch {shlex.quote(request.name + '.sbatch')} in this folder.",
        "",
        "# A signal that comes while the lines of the site run must not end this shell.",
        "trap 'is_asked=yes' USR1 TERM",
        "",
        *_site(cluster, has_ranks=request.has_ranks),
        *(_container(cluster, workdir=str(request.chdir)) if request.has_ranks else []),
        *([f"export PATCHLINE_STATE={shlex.quote(request.state)}"] if request.state else []),
        f"patchline=({shlex.join(cluster.command)})",
        f"set -- {shlex.join(request.words)}",
        *request.tail,
        "",
    ]
    return "\n".join([*lines, body[body.index(_BODY_BEGINS) :]])


def write_script(path: Path, text: str) -> None:
    """Writes a script that only its owner can read, because `setup:` may hold private lines. In a shared folder, the
    group can read it too, and a colleague's script is replaced."""
    path.unlink(missing_ok=True)
    path.touch(mode=private_mode())
    path.write_text(text)


@dataclass(frozen=True, kw_only=True)
class JobSize:
    """The size of one job: its nodes including spares, their GPUs, its time limit in Slurm's format, and its GPU-hours
    if it runs for all of that time (None without a limit)."""

    nodes: int
    gpus: int
    time_limit: str
    gpu_hours: float | None


def size_of(cluster: ClusterConfig, *, nodes: int, time_limit: str, has_ranks: bool) -> JobSize:
    """Returns the size of a job on this cluster. An empty `time_limit` stands for the cluster's."""
    limit = time_limit or cluster.time_limit
    with_spares = nodes + (cluster.spares if has_ranks else 0)
    gpus = with_spares * cluster.gpus_per_node if has_ranks else 0
    seconds = asked_seconds(limit) if limit else None
    hours = None if not seconds else gpus * seconds / 3600
    return JobSize(nodes=with_spares, gpus=gpus, time_limit=limit, gpu_hours=hours)


def most_hours(hours: float) -> str:
    """Returns a limit of GPU-hours, rounded up: to tenths below 10, else to whole hours."""
    tenths = math.ceil(round(10 * hours, 6))  # the sum of three thirds of an hour is one hour
    return f"{tenths / 10:g}" if tenths < 100 else f"{math.ceil(round(hours, 6)):,}"


def script_summary(request: Request, cluster: ClusterConfig, *, besides: Collection[str] = ()) -> str:
    """Returns the facts that a reader checks first: the command, the nodes, the GPUs, the most GPU-hours, the command
    that forecasts the GPU-hours of a training run (unless its recipe adapts to its inputs), and the #SBATCH lines,
    except those in `besides`, which are shown elsewhere."""
    one = size_of(cluster, nodes=request.nodes, time_limit=request.time_limit, has_ranks=request.has_ranks)
    tasks = sum(map(len, tasks_in(f"0_[{request.array}]"))) if request.array else 1
    size = f"{plural(tasks, 'task')}, each " if tasks > 1 else ""
    size += plural(one.nodes, "node")
    size += f" with {plural(one.gpus, 'GPU')} in all" if one.gpus else ""
    if one.gpu_hours is not None:
        hours = f" and {most_hours(tasks * one.gpu_hours)} GPU-hours" if one.gpus else ""
        if tasks == 1:
            size += f", at most {one.time_limit}{hours} for each job"
        else:
            size += f", at most {one.time_limit} each" + (f"{hours} in all" if hours else "")
    shown = shlex.join(["patchline", *request.words]).replace("\n", "\\n")
    lines = [request.name, f"  {shown}", f"  {size}"]
    if one.gpus and request.words[0] in WITH_SMOKE and request.words[1] not in _ADAPTING:
        lines.append(f"  {_forecast(request, cluster, time_limit=one.time_limit)}")
    lines += [f"  {line}" for line in head_lines(request, cluster) if line not in besides]
    return "\n".join(map(printable_name, lines)) + "\n"


def _forecast(request: Request, cluster: ClusterConfig, *, time_limit: str) -> str:
    """Returns a line with the command that forecasts how long a training run takes on these nodes. It has those flags
    of the run that the forecast depends on. If no plan has the cluster's GPU, the line says what to put in its
    place."""
    recipe, *words = request.words[1:]
    starts = [place for place, word in enumerate(words) if word.startswith("--")]
    flags = [words[start:end] for start, end in pairwise([*starts, len(words)])]
    own = [word for flag in flags if flag[0].startswith(_PLANNED) for word in (f"--training.{flag[0][2:]}", *flag[1:])]
    seconds = asked_seconds(time_limit) if time_limit else None
    limit = ["--max-time", f"{seconds / 3600:.4g}"] if seconds else []
    nodes = ["--nodes", str(request.nodes), "--gpus-per-node", str(cluster.gpus_per_node), *limit]
    is_known = cluster.gpu_type.lower() in GPU_NAMES
    gpu = cluster.gpu_type.lower() if is_known else "GPU"
    about = "" if is_known else f" (replace GPU by one of {', '.join(GPU_NAMES)})"
    return f"forecast of the whole run{about}: {shlex.join(['patchline', 'plan', recipe, '--gpu', gpu, *nodes, *own])}"


def head_lines(request: Request, cluster: ClusterConfig) -> list[str]:
    """Returns the #SBATCH lines of a job."""
    return [f"#SBATCH {option}" for option in _options(request, cluster)]


def _options(request: Request, cluster: ClusterConfig) -> list[str]:
    limit = request.time_limit or cluster.time_limit
    log = str(request.folder).replace("%", "%%") + ("/%x-%A_%a.out" if request.array else "/%x-%j.out")
    gpus = cluster.gpus_per_node if request.has_ranks else 0
    place = cluster.place_of(has_ranks=request.has_ranks)
    named = {
        "job-name": request.name,
        "comment": request.comment,
        "chdir": _quoted(str(request.chdir)),
        "output": _quoted(log),
        "open-mode": "append",
        **place,
        "constraint": _quoted(place["constraint"]) if place["constraint"] else "",
        "nodes": str(request.nodes + (cluster.spares if request.has_ranks else 0)),
        **(cluster.gpu_request if request.has_ranks else {}),
        "mem": "0" if request.has_ranks and cluster.takes_all_memory else "",
        "ntasks-per-node": str(gpus or 1),
        "cpus-per-task": str(request.cpus or (cluster.cpus_per_rank if request.has_ranks else 1) or ""),
        "time": limit,
        "array": request.array,
        "dependency": request.dependency,
        "signal": f"B:USR1@{cluster.margin_seconds}",
    }
    return [
        *(f"--{name}={value}" for name, value in named.items() if value),
        *(["--exclusive"] if request.has_ranks and cluster.exclusive else []),
        "--requeue" if cluster.requeue else "--no-requeue",
        *(["--no-kill"] if cluster.spares and request.has_ranks else []),
        *cluster.options_of(has_ranks=request.has_ranks),
    ]


def _quoted(text: str) -> str:
    """Quotes a value for an #SBATCH line."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _site(cluster: ClusterConfig, *, has_ranks: bool) -> list[str]:
    values = {
        "PATCHLINE_MARGIN": str(cluster.margin_seconds),
        "PATCHLINE_RETRIES": str(cluster.retries),
        "PATCHLINE_REQUEUE": "" if cluster.requeue else "no",
        "PATCHLINE_SPARES": str(cluster.spares or "") if has_ranks else "",
        "PATCHLINE_LAUNCHER": cluster.launcher if has_ranks and cluster.launcher != "srun" else "",
        "AWS_ENDPOINT_URL": cluster.s3_endpoint,
        "AWS_PROFILE": cluster.s3_profile,
        "TMPDIR": cluster.scratch,
    }
    return [f"export {name}={shlex.quote(value)}" for name, value in values.items() if value] + list(cluster.setup)


def _container(cluster: ClusterConfig, *, workdir: str) -> list[str]:
    """Returns the lines that make the script start ranks in the container. There are none if it has no image."""
    if not cluster.container.image:
        return []
    has_gpus = cluster.gpus_per_node > 0
    options, command = words_in_container(
        cluster.container, workdir=workdir, scratch=cluster.scratch, has_gpus=has_gpus
    )
    return [
        "# In the container, the home folder may be another one.",
        'export AWS_SHARED_CREDENTIALS_FILE="${AWS_SHARED_CREDENTIALS_FILE:-$HOME/.aws/credentials}"',
        'export AWS_CONFIG_FILE="${AWS_CONFIG_FILE:-$HOME/.aws/config}"',
        f"in_container=({shlex.join(options)})",
        f"rank_command=({shlex.join(command)})",
    ]


def names_of(words: Sequence[str]) -> str:
    """Returns a job's name made of its stage and recipe: at most 60 characters that need no quotes in Slurm and the
    shell."""
    text = "-".join(Path(word).name for word in words[:2])
    return "".join(letter if letter.isascii() and (letter.isalnum() or letter in "_.-") else "_" for letter in text)[
        :60
    ]
