"""Runs the short jobs of `patchline preflight`: two nodes read each other's files, and with --deep every node
multiplies matrices and all ranks exchange data. Pure functions judge what the nodes print.

A job waits for nodes no longer than `wait_seconds` (`srun --immediate`), and Slurm ends it after 3 minutes, or 5 with
--deep.
"""

import json
import re
import secrets
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from jobs import exit_codes
from jobs.cluster.container import words_in_container
from jobs.cluster.settings import ClusterConfig
from jobs.cluster.slurm import in_one_line, ran
from jobs.cluster.submit_checks import file_system
from jobs.output import put
from pipeline.ranks.environment import place_from
from shards.config_values import Range
from shards.errors import Finding, UserError
from shards.files.typed_json import read_record
from shards.output.terminal import printable_name

SLOW = 1.15  # a node is slow if it takes this many times the median
_SLOW_IMPORT_SECONDS = 20.0
_MINUTES = {"share": 3, "deep": 5}
_CACHE_SECONDS = 75  # by default (acdirmax), NFS may hide a new file for 60 s
_BUSY = re.compile(r"immediate|timed? ?out|busy|Unable to allocate", re.IGNORECASE)
_LINE = re.compile(r"^preflight (?P<node>\S+) (?P<what>\w+) ?(?P<more>.*)$", re.MULTILINE)
# Arguments: the folder, the seconds to wait for the other node's file, and the command.
_SHARE = r"""
cd "$1" 2>/dev/null || { echo "preflight $SLURMD_NODENAME missing"; exit 0; }
echo "$SLURMD_NODENAME" 2>/dev/null >"node-$SLURM_NODEID" || { echo "preflight $SLURMD_NODENAME unwritable"; exit 0; }
for ((waited = 0; waited < $2; waited++)); do
    unseen=""
    for ((node = 0; node < SLURM_NNODES; node++)); do [[ -s node-$node ]] || unseen+=" $node"; done
    [[ -n $unseen ]] || break
    ls >/dev/null
    sleep 1
done
[[ -s login ]] || unseen+=" login"
echo "preflight $SLURMD_NODENAME ${unseen:+unseen}${unseen:-shared}"
shift 2
said=answers
"$@" --version >/dev/null 2>&1 || said="silent $?"
echo "preflight $SLURMD_NODENAME $said"
"""
_DEEP = r"""
# A container has no scontrol. In it, the first name in a list such as n[01-03,7] has to resolve.
first=$(sed -E 's/\[([0-9]+).*/\1/; s/,.*//' <<<"$SLURM_JOB_NODELIST")
MASTER_ADDR=$(scontrol --oneliner show node "$first" 2>/dev/null | grep -oP '\bNodeAddr=\K\S+')
MASTER_ADDR=${MASTER_ADDR:-$first}
MASTER_PORT=$((20000 + SLURM_JOB_ID * 101 % 12000))
export MASTER_ADDR MASTER_PORT
exec "$@" __probe "$SLURMD_NODENAME"
"""


def options_of(cluster: ClusterConfig, *, nodes: int) -> list[str]:
    """Returns the options of a job on this cluster, for both sbatch and srun. Pure."""
    named = {**cluster.place_of(has_ranks=True), **cluster.gpu_request, "nodes": str(nodes)}
    options = cluster.options_of(has_ranks=True)
    return [*(f"--{name}={value}" for name, value in named.items() if value), *options]


@dataclass(frozen=True, kw_only=True)
class NodeFound:
    """What one rank found on its node. `import_seconds`: the time to import torch and DeepSpeed from a file system of
    the kind `imported_from`. `cached_seconds`: the time of a second process, which finds the files in the node's
    memory. Both are 0 if this rank did not measure them. `fault`: why the exchange failed; empty if it did not fail, or
    has not ended yet."""

    node: str
    rank: Annotated[int, Range(0)]
    product_seconds: Annotated[float, Range(0)]
    import_seconds: Annotated[float, Range(0)] = 0.0
    cached_seconds: Annotated[float, Range(0)] = 0.0
    imported_from: str = ""
    has_exchanged: bool = False
    fault: str = ""


def shared_checks(
    cluster: ClusterConfig, folder: Path, *, wait_seconds: int, environ: Mapping[str, str]
) -> list[Finding]:
    """Lets this machine and two nodes write to a new folder in `folder` (or in the nearest folder above it that
    exists), and checks that each node sees the files of the others and can run patchline."""
    below = next(one for one in (folder.absolute(), *folder.absolute().parents) if one.is_dir())
    place = below / f".patchline-preflight-{secrets.token_hex(8)}"
    try:
        place.mkdir(mode=0o700)
        (place / "login").write_text("login\n")
    except OSError as error:
        todo = "give a folder that you may write to"
        return [_failed("run directory", f"{printable_name(str(below))}: {error.strerror}", todo)]
    try:
        words = [*_srun(cluster, "share", nodes=2, wait_seconds=wait_seconds), "--ntasks-per-node=1"]
        options, setup, command = _of_ranks(cluster)
        script = "\n".join([*setup, _SHARE])
        words += [*options, "bash", "-c", script, "share", str(place), str(_CACHE_SECONDS), *command]
        text, fault = _output(words, environ, cluster, wait_seconds=wait_seconds)
    finally:
        _remove(place)
    if fault and not _LINE.search(text):
        return [_unanswered("run directory", fault, wait_seconds)]
    return judge_shared(text, where=printable_name(str(below)), command=shlex.join(command))


def judge_shared(text: str, *, where: str, command: str) -> list[Finding]:
    """Judges what the nodes have printed about the shared folder and the command. Pure."""
    said: dict[str, dict[str, str]] = {}
    for match in _LINE.finditer(text):
        said.setdefault(printable_name(match["node"]), {})[match["what"]] = match["more"]
    bad = {node: _why(what, list(said)) for node, what in said.items() if "shared" not in what}
    silent = [node for node, what in said.items() if "silent" in what]
    names = " and ".join(sorted(said))
    if bad or len(said) < 2:
        value = f"{where}: " + ("; ".join(f"{node} {why}" for node, why in bad.items()) or f"only {names} answered")
        found = [_failed("run directory", value, "give --run-dir a folder on storage that all nodes mount")]
    else:
        found = [Finding(name="run directory", status="ok", found=f"{where}: written and read on {names}, and here")]
    if silent:
        todo = "correct `command:` and `setup:` in your cluster's settings: it must be on storage that the nodes share"
        return [*found, _failed("command", f"{command} --version fails on {', '.join(silent)}", todo)]
    return [*found, Finding(name="command", status="ok", found=f"{command} answers on {names}")]


def _why(what: Mapping[str, str], nodes: Sequence[str]) -> str:
    if "missing" in what:
        return "has no such folder"
    if "unwritable" in what:
        return "cannot write there"
    others = [node for node in nodes if f"{nodes.index(node)}" in what.get("unseen", "").split()]
    return f"does not see what {' and '.join(others) or 'another node'} wrote within {_CACHE_SECONDS} s"


def deep_checks(cluster: ClusterConfig, *, nodes: int, wait_seconds: int, environ: Mapping[str, str]) -> list[Finding]:
    """Times imports and a matrix product on all nodes, and tries an exchange between them, with one rank per GPU."""
    tasks = f"--ntasks-per-node={max(1, cluster.gpus_per_node)}"
    words = [*_srun(cluster, "deep", nodes=nodes, wait_seconds=wait_seconds), tasks, "--kill-on-bad-exit=0"]
    options, setup, command = _of_ranks(cluster)
    words += [*options, "bash", "-c", "\n".join([*setup, _DEEP]), "deep", *command]
    text, fault = _output(words, environ, cluster, wait_seconds=wait_seconds)
    if fault and '"product_seconds"' not in text:
        return [_unanswered("nodes, deep", fault, wait_seconds)]
    return judge_deep(text, nodes=nodes)


def probe_node(words: Sequence[str], *, environ: Mapping[str, str]) -> int:
    """Runs `patchline __probe NODE`, the command of each rank of the deep job. Prints a line of JSON after the product,
    and another after the exchange. `words` has the node's name in Slurm. Returns 1 if the exchange failed, else 0."""
    if len(words) != 1:
        raise UserError(f"__probe takes the name of the node, got {len(words)} words")
    # The imports are timed before this process loads torch itself. The second import finds the files in the node's
    # memory.
    is_first = place_from(environ).local_rank == 0  # several imports at once would slow each other down
    import_seconds, cached_seconds = (_import_seconds() if is_first else 0.0 for _ in range(2))
    from pipeline.machine.probes import exchange, product_seconds  # noqa: PLC0415 - loads torch
    from pipeline.ranks.world import current_world  # noqa: PLC0415

    world = current_world("auto")
    found = NodeFound(
        node=words[0],
        rank=world.rank,
        product_seconds=product_seconds(world.device),
        import_seconds=import_seconds,
        cached_seconds=cached_seconds,
        imported_from=file_system(Path(sys.prefix)),
    )
    put(json.dumps(asdict(found)) + "\n")
    fault = exchange(world) if world.num_ranks > 1 else ""
    put(json.dumps(asdict(found) | {"has_exchanged": True, "fault": fault}) + "\n")
    return exit_codes.FAULTS_FOUND if fault else exit_codes.DONE


def _import_seconds() -> float:
    """Returns the seconds that a new process takes to import torch and DeepSpeed."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch, deepspeed"], capture_output=True, check=True)
    return time.monotonic() - began


def judge_deep(text: str, *, nodes: int) -> list[Finding]:
    """Judges what the ranks of the deep job have printed. A rank's later line replaces its earlier one. Pure."""
    ranks: dict[int, NodeFound] = {}
    for line in text.splitlines():
        if '"product_seconds"' in line:
            try:
                one = read_record(NodeFound, line)
            except ValueError:
                continue
            ranks[one.rank] = one
    by_node: dict[str, list[NodeFound]] = {}
    for one in ranks.values():
        by_node.setdefault(printable_name(one.node), []).append(one)
    if not by_node:
        return [_failed("product", "no node computed", "see `sinfo -R`, and run the command on a node by hand")]
    return [_judge_imports(by_node), _judge_speed(by_node, nodes), _judge_exchange(by_node, nodes)]


def _judge_imports(by_node: Mapping[str, Sequence[NodeFound]]) -> Finding:
    """Judges the imports by the slowest node, since all others wait for it."""
    first = max(one.import_seconds for found in by_node.values() for one in found)
    cached = max(one.cached_seconds for found in by_node.values() for one in found)
    kinds = ", ".join(sorted({printable_name(one.imported_from) for found in by_node.values() for one in found}))
    value = f"torch and DeepSpeed in {first:.1f} s on the slowest node, {cached:.1f} s once cached; from {kinds}"
    if first > max(_SLOW_IMPORT_SECONDS, 3 * cached):
        todo = "copy the environment to the disks of the nodes (docs/slurm.md says how), or use a container image"
        return Finding(name="imports", status="warning", found=value, allowed="20 s", todo=todo)
    return Finding(name="imports", status="ok", found=value)


def _judge_speed(by_node: Mapping[str, Sequence[NodeFound]], nodes: int) -> Finding:
    """Judges the matrix products. A node is as slow as its slowest rank."""
    seconds = {node: max(one.product_seconds for one in found) for node, found in by_node.items()}
    median = statistics.median(seconds.values())
    slow = {node: taken / median for node, taken in seconds.items() if taken > SLOW * median}
    value = f"{median * 1e3:.3g} ms on {len(seconds)} nodes in the median"
    if len(seconds) < nodes:
        todo = "see `sinfo -R`, and leave out those that did not answer: options: [--exclude=NODES]"
        return Finding(name="product", status="fault", found=value, allowed=f"{nodes} nodes answer", todo=todo)
    if slow:
        named = ", ".join(f"{node} {(times - 1) * 100:.0f} % slower" for node, times in sorted(slow.items()))
        todo = f"leave them out, since all wait for the slowest: options: [--exclude={','.join(sorted(slow))}]"
        return Finding(
            name="product", status="warning", found=f"{value}; {named}", allowed="up to 15 % slower", todo=todo
        )
    return Finding(name="product", status="ok", found=value)


def _judge_exchange(by_node: Mapping[str, Sequence[NodeFound]], nodes: int) -> Finding:
    bad = {
        node: next((one.fault for one in found if one.fault), "did not end")
        for node, found in by_node.items()
        if any(one.fault or not one.has_exchanged for one in found)
    }
    if not bad and len(by_node) == nodes:
        return Finding(name="exchange", status="ok", found=f"the sum over all ranks is right on {', '.join(by_node)}")
    why = next(iter(bad.values()), "not all answered")
    value = f"fails on {', '.join(bad) or 'some nodes'}: {printable_name(why)}"
    todo = "check that nodes reach each other on ports 20000 to 32000, and NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME"
    return _failed("exchange", value, todo)


def _of_ranks(cluster: ClusterConfig) -> tuple[list[str], list[str], list[str]]:
    """Returns srun's options for the container of ranks, the lines of shell before their command, and the command. In a
    container that srun starts, the lines of `setup:` do not run: the modules of the node are not there. Pure."""
    if not cluster.container.image:
        return [], list(cluster.setup), list(cluster.command)
    has_gpus = cluster.gpus_per_node > 0
    options, command = words_in_container(cluster.container, workdir="/", scratch=cluster.scratch, has_gpus=has_gpus)
    return options, [] if options else list(cluster.setup), command


def _srun(cluster: ClusterConfig, what: str, *, nodes: int, wait_seconds: int) -> list[str]:
    options = options_of(cluster, nodes=nodes)
    options.append("--export=ALL")  # overrides --export=NONE in the settings' options
    return ["srun", *options, f"--time={_MINUTES[what]}", f"--immediate={wait_seconds}", f"--job-name=preflight-{what}"]


def _output(
    words: list[str], environ: Mapping[str, str], cluster: ClusterConfig, *, wait_seconds: int
) -> tuple[str, str]:
    """Returns what a job prints, and why it failed (empty: it did not)."""
    try:
        seconds = wait_seconds + 60 * (max(_MINUTES.values()) + 2)
        done = ran(words, environ, seconds=seconds, inherited=cluster.environment)
    except UserError as error:
        return "", str(error)
    return done.stdout, "" if done.returncode == 0 else " ".join(done.stderr.split()) or "srun failed"


def _unanswered(name: str, fault: str, wait_seconds: int) -> Finding:
    if _BUSY.search(fault):
        value = f"not checked: no nodes were free within {wait_seconds} s"
        todo = "try again later, or wait longer: --wait-seconds 600"
        return Finding(name=name, status="warning", found=value, allowed="nodes are free", todo=todo)
    return _failed(name, in_one_line(fault), "correct your cluster's settings; `srun` with the same options")


def _failed(name: str, value: str, todo: str) -> Finding:
    allowed = {"run directory": "all nodes see the same files", "command": "exit code 0"}.get(name, "it works on all")
    return Finding(name=name, status="fault", found=value, allowed=allowed, todo=todo)


def _remove(place: Path) -> None:
    for path in place.iterdir():
        path.unlink(missing_ok=True)
    place.rmdir()
