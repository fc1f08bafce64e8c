"""The batch script of a job: the site's lines, the command's words, and the body that slurm/stage.sbatch is. Pure."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jobs.cluster.settings import ClusterConfig

_BODIES = (Path(__file__).parents[1] / "stage.sbatch", Path(__file__).parents[2] / "slurm" / "stage.sbatch")
_BODY_BEGINS = "# Run one stage of Patchline"


@dataclass(frozen=True, kw_only=True)
class Request:
    """One job. `words`: those of the command, the stage first. `folder`: where the script, the log and the records go;
    `chdir`: what relative paths in the words are relative to. Both are absolute."""

    words: tuple[str, ...]
    name: str
    comment: str
    nodes: int
    time_limit: str
    folder: Path
    chdir: Path
    has_ranks: bool = True
    """Whether it has a process per GPU, and the nodes to itself; else it is one process."""
    cpus: int = 0
    """CPUs of each process; 0: those of the cluster's settings."""
    dependency: str = ""
    array: str = ""
    """For --array, such as 0-3,7%2; `tail` then chooses the task's words."""
    tail: tuple[str, ...] = ()
    """Lines of shell after the words."""
    state: str = ""
    """Folder for the records of a stage without a run directory."""


def stage_body() -> str:
    """The text of slurm/stage.sbatch, of this installation or checkout."""
    return next(path for path in _BODIES if path.is_file()).read_text()


def batch_script(request: Request, cluster: ClusterConfig, *, body: str) -> str:
    """The text of a script for sbatch. `body`: that of slurm/stage.sbatch, of which the head is replaced."""
    shown = shlex.join(["patchline", *request.words]).replace("\n", "\\n")
    lines = [
        "#!/usr/bin/env bash",
        *(f"#SBATCH {option}" for option in _options(request, cluster)),
        "",
        "# Written by `patchline submit`, for the command:",
        f"#   {shown}",
        f"# To submit it by hand: sbatch {shlex.quote(request.name + '.sbatch')} in this folder.",
        "",
        "# A signal that comes while the lines of the site run must not end this shell.",
        "trap 'is_asked=yes' USR1 TERM",
        "",
        *_site(cluster, has_ranks=request.has_ranks),
        *([f"export PATCHLINE_STATE={shlex.quote(request.state)}"] if request.state else []),
        f"patchline=({shlex.join(cluster.command)})",
        f"set -- {shlex.join(request.words)}",
        *request.tail,
        "",
    ]
    return "\n".join([*lines, body[body.index(_BODY_BEGINS) :]])


def _options(request: Request, cluster: ClusterConfig) -> list[str]:
    limit = request.time_limit or cluster.time_limit
    log = str(request.folder).replace("%", "%%") + ("/%x-%A_%a.out" if request.array else "/%x-%j.out")
    gpus = cluster.gpus_per_node if request.has_ranks else 0
    named = {
        "job-name": request.name,
        "comment": request.comment,
        "chdir": _quoted(str(request.chdir)),
        "output": _quoted(log),
        "open-mode": "append",
        "partition": (cluster.cpu_partition if not request.has_ranks else "") or cluster.partition,
        "account": cluster.account,
        "qos": cluster.qos,
        "constraint": _quoted(cluster.constraint) if cluster.constraint and request.has_ranks else "",
        "nodes": str(request.nodes + (cluster.spares if request.has_ranks else 0)),
        "gpus-per-node": str(gpus or ""),
        "ntasks-per-node": str(gpus or 1),
        "cpus-per-task": str(request.cpus or (cluster.cpus_per_rank if request.has_ranks else 1) or ""),
        "time": limit,
        "array": request.array,
        "dependency": request.dependency,
        "signal": f"B:USR1@{cluster.margin_seconds}",
    }
    return [
        *(f"--{name}={value}" for name, value in named.items() if value),
        *(["--exclusive"] if request.has_ranks else []),
        "--requeue" if cluster.requeue else "--no-requeue",
        *(["--no-kill"] if cluster.spares and request.has_ranks else []),
        *cluster.options,
    ]


def _quoted(text: str) -> str:
    """As sbatch reads a value in a line #SBATCH."""
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


def names_of(words: Sequence[str]) -> str:
    """A job's name from its stage and recipe, of letters that Slurm and the shell read without quotes."""
    text = "-".join(Path(word).name for word in words[:2])
    return "".join(letter if letter.isascii() and (letter.isalnum() or letter in "_.-") else "_" for letter in text)[
        :60
    ]
