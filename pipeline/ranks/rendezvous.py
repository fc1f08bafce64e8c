"""Sets up where the ranks of a run meet: the store that rank 0 serves, and the interface on which gloo listens.

Neither the store nor gloo authenticates who connects, so each listens only at the address that the ranks share. By
default, torch's TCPStore would listen on every interface, and gloo on the interface to which the host's name resolves.

All ranks must arrive within a time limit. Rank 0 sees at the store which ranks have arrived, and tells the others. So
all ranks end with the same message, which names the missing ones, instead of a timeout in their next exchange.

A single rank opens no socket, although gloo and NCCL would listen on a port even then. Its process group is written in
Python, and copies from each input to its output. It implements the methods of `torch.distributed.ProcessGroup` that
Patchline and DeepSpeed call, like torch/testing/_internal/distributed/multi_threaded_pg.py.
"""

import errno
import fcntl
import ipaddress
import logging
import re
import socket
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]  # its stub does not export them

from pipeline.ranks.environment import RankPlace
from shards.errors import TransientError

_NAME = "alone"
_DEVICES = ["cpu", "cuda"]
log = logging.getLogger("patchline")
# How long a rank pauses between its tries to connect, until rank 0 listens; 512 ranks may be trying.
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.02, 0.5
_BACKLOG = 4096  # connections that may wait; the kernel's limit is net.core.somaxconn
_SIOCGIFADDR = 0x8915  # linux/sockios.h
_IPV6_ADDRESSES = Path("/proc/net/if_inet6")
_MOST_HOSTS = 8
_LIST = re.compile(r"([^\[\],]+)(?:\[([0-9,-]+)\])?([^\[\],]*)(?:,|$)")
UNKNOWN = ""


def join_alone() -> None:
    """Makes this process the only member of torch.distributed's default group."""
    dist.Backend.register_backend(_NAME, _group, devices=_DEVICES)
    dist.init_process_group(_NAME, store=HashStore(), rank=0, world_size=1)


class _Done(dist.Work):
    """An exchange that is already complete."""

    def wait(self, *_timeout: Any, **_options: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class _Alone(dist.ProcessGroup):
    """A process group of one rank. Each collective leaves the right values for a single rank in its tensors: sums,
    means, minima and maxima over one rank are the rank's own values. Methods that torch 2.13 has renamed also have
    their earlier names."""

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return _NAME

    def _stay(self, *_tensors: Any, **_options: Any) -> dist.Work:
        return _Done()

    def _start_coalescing(self, device: torch.device) -> None:
        """Does nothing, since no operation is deferred."""

    def _copy(self, *tensors: Any, **_options: Any) -> dist.Work:
        """Copies an input to an output. The arguments after these two are options."""
        output, tensor = tensors[:2]
        with torch.no_grad():  # like a collective's kernel, which autograd does not see
            output.view(-1).copy_(tensor.reshape(-1))
        return _Done()

    def _copy_all(self, *lists: Any, **_options: Any) -> dist.Work:
        """Copies a list of inputs to a list of outputs. Each entry is a tensor, or a list with one tensor for each
        rank."""
        for output, tensor in zip(*lists[:2], strict=True):
            self._copy(_only(output), _only(tensor))
        return _Done()

    barrier = broadcast = reduce = allreduce = allreduce_coalesced = _stay
    _end_coalescing = _stay
    all_gather_single = reduce_scatter_single = _copy
    _allgather_base = _reduce_scatter_base = _copy
    allgather = reduce_scatter = all_gather_single_coalesced = reduce_scatter_single_coalesced = _copy_all
    allgather_into_tensor_coalesced = reduce_scatter_tensor_coalesced = _copy_all


def _only(tensor: Any) -> Any:
    if isinstance(tensor, list):
        (tensor,) = tensor
    return tensor


def _group(_store: object, rank: int, num_ranks: int, _timeout: timedelta) -> dist.ProcessGroup:
    return _Alone(rank, num_ranks)  # type: ignore[call-arg]  # of its two constructors, the stub has one


def serve_store(address: str, port: int, *, num_ranks: int, timeout: timedelta) -> TCPStore:
    """Returns rank 0's store, which listens at `address` only. Does not wait for the other ranks. Raises TransientError
    if the port is taken."""
    return TCPStore(
        address,
        port,
        num_ranks,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listen_at(address, port).detach(),  # the store closes the descriptor
    )


def listen_at(address: str, port: int) -> socket.socket:
    """Returns a socket that listens at `address`. If that is not an address of this host that others can reach, logs a
    warning and listens on every interface. Raises TransientError if the port is taken."""
    for family, place in _places(address, port):
        try:
            return socket.create_server(place, family=family, backlog=_BACKLOG)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise _taken(address, port, error) from error
    log.warning(
        "MASTER_ADDR %r resolves to no address of this host that others can reach, so rank 0 listens for them on "
        "every interface, port %d; set MASTER_ADDR to an address of rank 0's host",
        address,
        port,
    )
    try:
        if socket.has_dualstack_ipv6():
            return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG)
        return socket.create_server(("", port), backlog=_BACKLOG)
    except OSError as error:
        raise _taken(address, port, error) from error


def reach_store(address: str, port: int, *, num_ranks: int, timeout: timedelta) -> TCPStore:
    """Returns a client of the store that another process serves. Raises TransientError if nothing answers within
    `timeout`."""
    deadline, seconds = time.monotonic() + timeout.total_seconds(), timeout.total_seconds()
    pause = _FIRST_PAUSE_SECONDS
    while True:  # torch's client would wait twice as long, and print a C++ trace
        try:
            socket.create_connection((address, port), timeout=seconds).close()
            break
        except (OSError, UnicodeError) as error:
            if time.monotonic() > deadline:
                raise TransientError(
                    f"rank 0 of {num_ranks} has not arrived within {seconds:.0f} s: nothing answers at "
                    f"{address}:{port}, where the ranks meet ({error}); see its log, and whether this host reaches "
                    "that one"
                ) from error
        threading.Event().wait(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
    return TCPStore(address, port, num_ranks, is_master=False, timeout=timeout, wait_for_workers=False)


def interface_towards(address: str) -> str:
    """Returns the network interface from which this host reaches `address`; empty if that is unknown."""
    for family, place in _places(address, 1):
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(place)  # for UDP, this sends nothing
            except OSError:
                continue
            own = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            if own in _addresses(name):
                return name
    return ""


def _taken(address: str, port: int, error: OSError) -> TransientError:
    return TransientError(
        f"rank 0 cannot listen at {address}:{port} ({error.strerror}); if another program uses the port, choose "
        "another MASTER_PORT"
    )


def _places(address: str, port: int) -> list[tuple[socket.AddressFamily, tuple[str, int]]]:
    """Returns what the name resolves to, with IPv6 first, which is the order in which torch's clients try addresses.
    Returns nothing if it does not resolve.

    Some systems resolve their own host's name to 127.0.1.1, unlike other hosts. Such an address is left out.
    """
    try:
        found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    places = [(family, (str(place[0]), port)) for family, _, _, _, place in found]
    places = [place for place in places if _is_only_here(address) or not _is_only_here(place[1][0])]
    return sorted(places, key=lambda place: place[0] != socket.AF_INET6)


def _is_only_here(address: str) -> bool:
    """Returns whether this is a loopback address or `localhost`. On any other host, it means that host itself."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return address.partition(".")[0] == "localhost"


def _addresses(interface: str) -> set[str]:
    """Returns an interface's first IPv4 address and its IPv6 addresses."""
    found = set()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
            found.add(socket.inet_ntoa(answer[20:24]))
        except OSError:  # it has no IPv4 address
            pass
    if _IPV6_ADDRESSES.exists():
        for line in _IPV6_ADDRESSES.read_text().splitlines():
            digits, *_, name = line.split()
            if name == interface:
                found.add(str(ipaddress.IPv6Address(int(digits, 16))))
    return found


def missing_message(missing: Sequence[int], hosts: Sequence[str], *, seconds: float) -> str:
    """Returns the message that says which ranks have not arrived, by host. `hosts`: the hosts of all ranks; UNKNOWN if
    a host is not known. Pure."""
    by_host: dict[str, list[int]] = {}
    for rank in missing:
        by_host.setdefault(hosts[rank], []).append(rank)
    named = [
        f"{ranks_words(ranks)} on {f'host {host}' if host else 'a host that is not known'}"
        for host, ranks in by_host.items()
    ]
    more = f"; {len(named) - _MOST_HOSTS} more hosts" if len(named) > _MOST_HOSTS else ""
    verb = "has" if len(missing) == 1 else "have"
    return (
        f"{ranks_words(missing)} of {len(hosts)} {verb} not arrived within {seconds:.0f} s: "
        f"{'; '.join(named[:_MOST_HOSTS])}{more}; see the logs of these ranks, or leave their hosts out"
    )


def ranks_words(ranks: Sequence[int]) -> str:
    """Returns a text such as `rank 3`, `ranks 0, 2` or `ranks 0, 8-15`. `ranks` must be in rising order."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    shown = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(shown)}"


def hosts_of(environ: Mapping[str, str], place: RankPlace, arrived: Mapping[int, str]) -> list[str]:
    """Returns the host of each rank: the host that the rank itself reports if it has arrived, else the host where its
    launcher has put it, else UNKNOWN. `arrived`: the hosts of the ranks that have arrived, by rank. Pure.

    Slurm lists the nodes of a step and, by default, fills them one after another. torchrun and `--processes` start
    equally many ranks on each host."""
    hosts = [UNKNOWN] * place.num_ranks
    if "RANK" not in environ:
        found = _slurms(environ)
        hosts = found if len(found) == place.num_ranks else hosts
    elif "LOCAL_WORLD_SIZE" in environ:
        by_node = {rank // place.num_local_ranks: host for rank, host in arrived.items()}
        hosts = [by_node.get(rank // place.num_local_ranks, UNKNOWN) for rank in range(place.num_ranks)]
    return [arrived.get(rank, host) for rank, host in enumerate(hosts)]


def _slurms(environ: Mapping[str, str]) -> list[str]:
    """Returns the node of each task of a Slurm step, in the order of the tasks. Returns nothing if the tasks are not
    distributed in blocks, or if Slurm's variables cannot be read."""
    if not environ.get("SLURM_DISTRIBUTION", "block").startswith("block"):
        return []
    nodes = nodes_in(environ.get("SLURM_STEP_NODELIST", ""))
    counts: list[int] = []
    for entry in environ.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        if found := re.fullmatch(r"([0-9]{1,7})(?:\(x([0-9]{1,7})\))?", entry):
            counts += [int(found[1])] * min(int(found[2] or 1), len(nodes))
    if len(counts) != len(nodes):
        return []
    return [node for node, count in zip(nodes, counts, strict=True) for _ in range(count)]


def nodes_in(text: str) -> list[str]:
    """Returns the names in one of Slurm's lists, such as `n[1-3,07],login`. Returns nothing if it has another form."""
    nodes: list[str] = []
    if "".join(match[0] for match in _LIST.finditer(text)) != text:
        return []
    for before, ranges, after in _LIST.findall(text):
        for one in ranges.split(",") if ranges else ("",):
            first, _, last = one.partition("-")
            numbers = range(int(first), int(last or first) + 1) if first else (None,)
            names = (f"{number:0{len(first)}d}" if number is not None else "" for number in numbers)
            nodes += [f"{before}{name}{after}" for name in names]
    return nodes
