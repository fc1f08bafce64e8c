"""What a partition of Slurm allows a job: how long it may run, and on how many nodes.

With EnforcePartLimits=NO, Slurm's default, sbatch takes a job that asks for more, and the job waits for ever.
"""

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass

from jobs.cluster.preflight_slurm import asked_seconds, seconds_of
from jobs.cluster.settings import ClusterConfig
from jobs.cluster.slurm import ran
from shards.errors import UserError
from shards.output.quantities import duration
from shards.output.terminal import printable_name

_WORD = re.compile(r"(\w+)=(\S*)")
_LEAST_GATE_MINUTES, _MOST_GATE_MINUTES = 2, 30  # a gate waits at most 10 of them for Slurm
_ANYWAY = "or submit with --no-check"


@dataclass(frozen=True, kw_only=True)
class PartitionLimits:
    """The limits of one partition, or the widest of several, in seconds and nodes; None: no limit, or not known.
    `default_seconds`: of a job that asks for no time."""

    name: str
    seconds: int | None = None
    default_seconds: int | None = None
    nodes: int | None = None


def partition_for(cluster: ClusterConfig, *, has_ranks: bool) -> str:
    """The name that a job gives to sbatch; empty: Slurm's default."""
    return (cluster.cpu_partition if not has_ranks else "") or cluster.partition


def limits_of(partition: str, environ: Mapping[str, str]) -> PartitionLimits:
    """Returns the limits of a partition, of several as in `a,b`, or of the default one (empty), as far as Slurm
    says."""
    if shutil.which("scontrol", path=environ.get("PATH")) is None:
        return PartitionLimits(name=partition)
    done = ran(["scontrol", "--oneliner", "show", "partition"], environ)
    names = partition.split(",") if partition else []
    found = []
    for line in done.stdout.splitlines() if done.returncode == 0 else ():
        fields = dict(_WORD.findall(line))
        if fields.get("PartitionName") in names or (not names and fields.get("Default") == "YES"):
            found.append(fields)
    if not found:
        return PartitionLimits(name=partition)
    times = [seconds_of(fields.get("MaxTime", "")) for fields in found]
    nodes = [fields.get("MaxNodes", "") for fields in found]
    defaults = [seconds_of(fields.get("DefaultTime", "")) for fields in found]
    return PartitionLimits(
        name=partition or found[0]["PartitionName"],
        seconds=_most(times),
        default_seconds=defaults[0] if len(found) == 1 and defaults[0] is not None else _most(times),
        nodes=_most([int(each) if each.isascii() and each.isdecimal() else None for each in nodes]),
    )


def _most(limits: list[int | None]) -> int | None:
    known = [limit for limit in limits if limit is not None]
    return max(known) if len(known) == len(limits) else None


def refuse_over_limits(limits: PartitionLimits, *, nodes: int, time_limit: str, margin: int) -> None:
    """UserError if a job would wait for ever, or would end before it has saved. `time_limit`: in Slurm's words, empty:
    the partition's default; `margin`: seconds before the limit at which the ranks are asked to save. Pure."""
    asked, shown = asked_seconds(time_limit), printable_name(limits.name)
    if asked is not None and limits.seconds is not None and asked > limits.seconds:
        raise UserError(
            f"the time limit is {duration(asked)}, and partition {shown} allows {duration(limits.seconds)}: the job "
            "would wait for ever; lower --time, since a requeued job continues where it was ended, or choose another "
            f"partition, {_ANYWAY}"
        )
    if limits.nodes is not None and nodes > limits.nodes:
        raise UserError(
            f"{nodes:,} nodes are asked for, spares with them, and partition {shown} allows {limits.nodes:,}: the job "
            f"would wait for ever; lower --nodes, or choose another partition, {_ANYWAY}"
        )
    if asked is None and limits.default_seconds is not None and limits.default_seconds <= margin:
        raise UserError(
            f"partition {shown} ends a job without a time limit after {duration(limits.default_seconds)}, and the "
            f"ranks are asked to save {margin} s before; give --time, or lower margin_seconds to no less than a step "
            f"and a save take, {_ANYWAY}"
        )


def gate_minutes(limits: PartitionLimits) -> int:
    """The time limit of a chain's gates. UserError if the partition allows less than a gate needs. Pure."""
    if limits.seconds is None:
        return _MOST_GATE_MINUTES
    if limits.seconds < _LEAST_GATE_MINUTES * 60:
        raise UserError(
            f"partition {printable_name(limits.name)} allows {duration(limits.seconds)}, and a gate of a chain needs "
            f"{_LEAST_GATE_MINUTES} minutes; set cpu_partition in your cluster's settings to another one"
        )
    return min(_MOST_GATE_MINUTES, limits.seconds // 60)
