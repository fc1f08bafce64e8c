"""Defines and reads cluster.yaml, which holds the settings that all jobs on a cluster share. slurm/cluster.example.yaml
is an example."""

import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Annotated, Literal

from jobs.cluster.container import ContainerConfig
from jobs.cluster.secret_names import refuse_secret_lines, refuse_wrong_names
from jobs.record import read_config
from shards.config_values import Range, refuse_wrong_values, shown_value
from shards.errors import UserError
from shards.output.url_secrets import has_secret

# Characters that need no quotes in an #SBATCH line. They are enough for a cluster's names, constraints and lists.
_WORD = re.compile(r"[A-Za-z0-9_.,:;&|*+@/=()\[\]{}-]+")
_GPU_TYPE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_OF_MEMORY = re.compile(r"--mem(-per-(cpu|gpu))?(=|$)")
_OPTION = re.compile(rf"--[a-z][a-z0-9-]*(={_WORD.pattern})?")
_LIMIT = re.compile(r"[0-9]{1,4}(-[0-9]{1,2}(:[0-9]{2}){0,2}|:[0-9]{2}(:[0-9]{2})?)?")
_SHOWN_LIMIT = re.compile(r"(?:(?P<days>\d+)-)?(?:(?P<hours>\d+):)?(?P<minutes>\d+):(?P<seconds>\d+)")
_OURS = (
    *("array", "chdir", "comment", "dependency", "error", "job-name", "nodes", "ntasks"),
    "no-kill",
    *("ntasks-per-node", "open-mode", "output", "requeue", "no-requeue", "signal", "wrap"),
)
# Options of sbatch -> the settings to use instead.
_SETTINGS = {
    "account": "account",
    "cpus-per-task": "cpus_per_rank",
    "exclusive": "exclusive",
    "gpus": "gpus_per_node",
    "gpus-per-node": "gpus_per_node",
    "partition": "partition",
    "time": "time_limit",
}
_GRES = "--gres="
# These options make sbatch print something other than a job's number, or wait for the job.
_OF_THE_ANSWER = ("help", "parsable", "quiet", "test-only", "usage", "verbose", "version", "wait")


class Names(Enum):
    """The names of a job's time limit and nodes in messages: the flags of `submit`, or the fields of a chain's step."""

    OF_SUBMIT = ("--time", "--nodes")
    OF_STEP = ("`time:` of the step", "`nodes:` of the step")

    def __init__(self, time: str, nodes: str) -> None:
        self.time, self.nodes = time, nodes


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """Settings that all jobs on a cluster share. An empty field keeps Slurm's default."""

    partition: str = ""
    """Slurm's partition."""
    account: str = ""
    """Account that the time is charged to."""
    qos: str = ""
    """Quality of service."""
    cpu_partition: str = ""
    """Partition for jobs without GPUs: packing, checks, reports and the gates of a chain; empty: the same partition."""
    cpu_account: str = ""
    """Account for jobs without GPUs; empty: the same account."""
    cpu_qos: str = ""
    """Quality of service for jobs without GPUs; empty: the same."""
    cpu_constraint: str = ""
    """Features of nodes for jobs without GPUs, on clusters that need one, such as cpu."""
    constraint: str = ""
    """Features that nodes must have, such as h100."""
    gpus_per_node: Annotated[int, Range(0, 1024, zero="none: one rank per node")] = 0
    """GPUs of each node; a job has one rank per GPU."""
    gpu_type: str = ""
    """Slurm's name for the type of GPU, such as h100, if a partition has several types."""
    gpus_by: Literal["gpus-per-node", "gres", "nothing"] = "gpus-per-node"
    """Option of sbatch that asks for the GPUs: --gpus-per-node=8; --gres=gpu:8, on older clusters; or nothing, if Slurm
    does not count GPUs and a whole node comes with them."""
    exclusive: bool = True
    """Whether a job with ranks takes whole nodes (--exclusive); no: it shares them, and asks for `cpus_per_rank`."""
    all_memory: bool = True
    """Whether a job with ranks asks for all memory of its nodes (--mem=0). It gets the site's default with no, if Slurm
    refuses --mem=0, and with `exclusive: no`; --mem among the `options` asks for another amount."""
    cpus_per_rank: Annotated[int, Range(0, 4096, zero="an equal share of the node's")] = 0
    """CPUs of each rank."""
    time_limit: str = ""
    """Time limit of a job, in Slurm's format: 90 (minutes), 24:00:00, 2-00:00:00."""
    margin_seconds: Annotated[int, Range(10, 86_400)] = 120
    """How long before the time limit the ranks are asked to save. This must be longer than a step and a save take."""
    retries: Annotated[int, Range(0, 100)] = 2
    """How often a job is tried again after a crash, in one allocation."""
    requeue: bool = True
    """Whether jobs may be requeued; no: give `--links`, so that several jobs in a row continue a run."""
    launcher: Literal["srun", "torchrun"] = "srun"
    """Program that starts the ranks: srun, with one task per rank; or torchrun, with one per node."""
    spares: Annotated[int, Range(0, 1024, zero="none: a job that loses a node is requeued")] = 0
    """Spare nodes of each job, which replace sick or lost ones."""
    options: tuple[str, ...] = ()
    """More options of sbatch, such as --reservation=vit."""
    environment: tuple[str, ...] = ()
    """Names of the variables that jobs inherit besides the usual ones: MY_DATA, or MY_* for all that begin with MY_.
    Secrets are never passed on: a line of `setup:` reads them on the node."""
    setup: tuple[str, ...] = ()
    """Lines of shell that run before the command, such as `module load python/3.11`."""
    command: tuple[str, ...] = ()
    """The command that runs patchline on a node; empty: the patchline that submits the job, which must then be on
    storage that the nodes share."""
    container: ContainerConfig = field(default_factory=ContainerConfig)
    """The container in which ranks run; without it, they run `command` on the node itself."""
    s3_endpoint: str = ""
    """URL of the S3-compatible store, such as https://s3.example.org; empty: AWS."""
    s3_profile: str = ""
    """Profile of ~/.aws/credentials. The secrets themselves are never submitted."""
    scratch: str = ""
    """Folder for temporary files on each node (TMPDIR)."""

    def __post_init__(self) -> None:
        refuse_wrong_values(self, where="")
        for name in ("partition", "account", "qos", "constraint"):
            for each in (name, f"cpu_{name}"):
                _refuse_wrong_name(getattr(self, each), what=each)
        self._refuse_wrong_nodes()
        if self.time_limit:
            refuse_wrong_limit(self.time_limit, what="time_limit")
        for option in self.options:
            if not _OPTION.fullmatch(option):
                raise UserError(f"options has {shown_value(option)}; allowed: --name or --name=value, without spaces")
            _refuse_ours(option)
        refuse_secret_lines(self.options, what="options")
        refuse_wrong_names(self.environment)
        for name in ("setup", "command"):
            _refuse_lines(getattr(self, name), what=name)
        for name in ("s3_endpoint", "s3_profile", "scratch"):
            if not getattr(self, name).isprintable():
                raise UserError(f"{name} is {shown_value(getattr(self, name))}; allowed: printable characters")
        is_url = re.fullmatch(r"https?://[^/@\s]+(/[^@\s]*)?", self.s3_endpoint)
        if self.s3_endpoint and (not is_url or has_secret(self.s3_endpoint)):
            shown = shown_value(self.s3_endpoint)
            raise UserError(f"s3_endpoint is {shown}; allowed: http(s)://HOST[:PORT], without a password or a key")

    def _refuse_wrong_nodes(self) -> None:
        """Raises UserError if the settings of GPUs and of whole nodes do not go together."""
        if self.gpu_type and not _GPU_TYPE.fullmatch(self.gpu_type):
            raise UserError(f"gpu_type is {shown_value(self.gpu_type)}; allowed: letters, digits and _.-, such as h100")
        if self.gpu_type and not self.gpus_per_node:
            raise UserError(f"gpu_type is {self.gpu_type} and gpus_per_node 0; give gpus_per_node, too")
        if self.gpu_type and self.gpus_by == "nothing":
            raise UserError(f"gpu_type is {self.gpu_type} and gpus_by nothing, which asks for no GPUs; leave one out")
        if not self.exclusive and not self.cpus_per_rank:
            raise UserError(
                "exclusive is no and cpus_per_rank 0; on a shared node, a rank would get one CPU: give cpus_per_rank"
            )

    @property
    def takes_all_memory(self) -> bool:
        """Whether jobs with ranks ask for all memory of their nodes. They do not if they share the nodes, or if
        `options` ask for another amount."""
        return self.all_memory and self.exclusive and not any(map(_OF_MEMORY.match, self.options))

    def place_of(self, *, has_ranks: bool) -> dict[str, str]:
        """Returns the options of sbatch that say where a job with ranks, or one without GPUs, may run, and who pays.
        Options with an empty value keep Slurm's default."""
        own = {name: getattr(self, name) for name in ("partition", "account", "qos", "constraint")}
        if has_ranks:
            return own
        named = {name: getattr(self, f"cpu_{name}") or value for name, value in own.items()}
        return named | {"constraint": self.cpu_constraint}  # that of the GPU nodes would not do

    def partition_for(self, *, has_ranks: bool) -> str:
        """Returns the partition for jobs with ranks, or for jobs without GPUs. An empty string stands for Slurm's
        default partition."""
        return self.place_of(has_ranks=has_ranks)["partition"]

    @property
    def gpu_request(self) -> dict[str, str]:
        """The option of sbatch that asks for the GPUs of each node. Slurm takes only the last --gres, so the one in
        `options` is joined to that of the GPUs."""
        if not self.gpus_per_node or self.gpus_by == "nothing":
            return {}
        wanted = f"{self.gpu_type}:{self.gpus_per_node}" if self.gpu_type else str(self.gpus_per_node)
        if self.gpus_by == "gpus-per-node":
            return {"gpus-per-node": wanted}
        others = [option.removeprefix(_GRES) for option in self.options if option.startswith(_GRES)]
        return {"gres": ",".join([f"gpu:{wanted}", *others])}

    def options_of(self, *, has_ranks: bool) -> list[str]:
        """Returns `options`, without a --gres that `gpu_request` already has."""
        is_joined = has_ranks and "gres" in self.gpu_request
        return [option for option in self.options if not (is_joined and option.startswith(_GRES))]


def _refuse_wrong_name(value: str, *, what: str) -> None:
    if value and not _WORD.fullmatch(value):
        raise UserError(f"{what} is {shown_value(value)}; allowed: letters, digits and _.,:;&|*+@/=()[]{{}}-")


def _refuse_ours(option: str) -> None:
    """Raises UserError for an option that patchline sets itself, that has its own setting, or that changes how sbatch
    answers, even in an abbreviated form that sbatch would accept."""
    if option.startswith(_GRES) and any(each.startswith("gpu") for each in option.removeprefix(_GRES).split(",")):
        raise UserError(f"options has {shown_value(option)}; set `gpus_per_node:` and `gpus_by: gres` instead")
    name = option.removeprefix("--").partition("=")[0]
    names = sorted((*_OURS, *_SETTINGS, *_OF_THE_ANSWER))  # an exact name sorts before longer ones
    full = next((one for one in names if one.startswith(name)), "")
    if not full:
        return
    shown = shown_value(option) + (f", which sbatch may take for --{full}" if full != name else "")
    if full in _SETTINGS:
        raise UserError(f"options has {shown}; set `{_SETTINGS[full]}:` instead")
    why = "with which sbatch does not answer as it must" if full in _OF_THE_ANSWER else "which patchline sets itself"
    raise UserError(f"options has {shown}, {why}; leave it out")


def _refuse_lines(lines: tuple[str, ...], *, what: str) -> None:
    refuse_secret_lines(lines, what=what)
    for line in lines:
        if not line.strip() or not line.isprintable():
            raise UserError(f"{what} has {shown_value(line)}; allowed: one line of printable characters")


def refuse_wrong_limit(text: str, *, what: str) -> None:
    """Raises UserError if a time limit is not in Slurm's format."""
    if not _LIMIT.fullmatch(text):
        raise UserError(f"{what} is {shown_value(text)}; allowed: MINUTES, HH:MM:SS or D-HH:MM:SS, such as 24:00:00")


def seconds_of(limit: str) -> int | None:
    """Returns a limit in seconds, from the form that Slurm shows, such as 1-00:00:00. Returns None for UNLIMITED and
    other text. Pure."""
    match = _SHOWN_LIMIT.fullmatch(limit)
    if not match:
        return None
    days, hours, minutes, seconds = (int(match[name] or 0) for name in ("days", "hours", "minutes", "seconds"))
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def asked_seconds(limit: str) -> int | None:
    """Returns a limit in seconds, from the form that sbatch takes: 90 is minutes, 1-12 is days and hours. Returns None
    for an empty limit. Pure."""
    if not limit:
        return None
    days, has_days, rest = limit.rpartition("-")
    numbers = [int(word) for word in rest.split(":")]
    if has_days:
        hours, minutes, seconds = [*numbers, 0, 0][:3]
    elif len(numbers) == 1:
        hours, minutes, seconds = 0, numbers[0], 0
    else:
        hours, minutes, seconds = [0, *numbers][-3:]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def read_cluster(path: Path) -> ClusterConfig:
    """Reads the settings from a YAML file. Raises UserError with the line of each mistake."""
    example = "the output of `patchline example cluster.yaml`"
    return read_config(
        path, ClusterConfig, example=example, todo=f"give --cluster your copy of {example}", base=ClusterConfig()
    )


def with_command(cluster: ClusterConfig, environ: Mapping[str, str]) -> ClusterConfig:
    """Returns the settings. If they name no command, adds the `patchline` of this environment. Raises UserError if
    there is none."""
    if cluster.command:
        return cluster
    beside = Path(sys.executable).parent / "patchline"  # found even if it is not on the PATH
    found = shutil.which("patchline", path=environ.get("PATH")) if not beside.is_file() else str(beside)
    if found is None:
        raise UserError("patchline is not on the PATH; set `command:` in the file of your cluster's settings")
    return replace(cluster, command=(str(Path(found).absolute()),))
