"""How much memory one rank may use on its device."""

from dataclasses import dataclass
from pathlib import Path

import torch

from pipeline.ranks.world import World

# Of a GPU: the contexts of CUDA, cuBLAS and cuDNN and NCCL's buffers, and what the allocator cannot use because its
# free pieces are too small. [unverified]: nothing has been measured on a GPU; the first steps are tried before training
# (pipeline/training/trial.py).
_GPU_CONTEXT_BYTES, _GPU_FRAGMENTED = 2_000_000_000, 0.08
# Of a host, for each rank: libraries, and what malloc keeps. ViT-S/16 and B/16 needed 0.2 to 0.8 GB beside their
# tensors.
_LIBRARIES_BYTES, _HOST_FRAGMENTED = 500_000_000, 0.05
_PROC, _CGROUP = Path("/proc"), Path("/sys/fs/cgroup")
_NO_LIMIT = 1 << 60  # version 1 writes a number near 2^63


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Memory of a rank: of its device, or its share of the host's. `reserve` is not for tensors. `where` names it."""

    total_bytes: int
    reserve_bytes: int
    where: str

    @property
    def bytes(self) -> int:
        """What tensors may take."""
        return max(0, self.total_bytes - self.reserve_bytes)


def budget_of(world: World, *, read_ahead_bytes: int) -> Budget:
    """This rank's budget. `read_ahead_bytes`: the most that the data of all ranks on this host takes of the host."""
    if world.device.type == "cuda":
        properties = torch.cuda.get_device_properties(world.device)
        return gpu_budget(int(properties.total_memory), where=str(properties.name))
    return host_budget(available_bytes() - read_ahead_bytes, num_local_ranks=world.num_local_ranks)


def gpu_budget(total_bytes: int, *, where: str) -> Budget:
    """The budget of a GPU with this many bytes, as CUDA reports them."""
    reserve = _GPU_CONTEXT_BYTES + int(_GPU_FRAGMENTED * total_bytes)
    return Budget(total_bytes=total_bytes, reserve_bytes=reserve, where=where)


def host_budget(free_bytes: int, *, num_local_ranks: int) -> Budget:
    """A rank's share of the bytes that a host has left."""
    share = max(0, free_bytes) // num_local_ranks
    reserve = _LIBRARIES_BYTES + int(_HOST_FRAGMENTED * share)
    return Budget(total_bytes=share, reserve_bytes=reserve, where="this host")


def available_bytes(*, proc: Path = _PROC, cgroup: Path = _CGROUP) -> int:
    """What this process and its siblings may still take: the host's available memory, or the rest of the tightest
    cgroup limit. `_NO_LIMIT` if neither is known."""
    rests = [_host_available(proc), *_rests_of_version_2(proc, cgroup), *_rest_of_version_1(cgroup)]
    return min(rests)


def _host_available(proc: Path) -> int:
    for line in _text(proc / "meminfo").splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if name == "MemAvailable" and words and words[0].isdecimal():
            return int(words[0]) * 1024
    return _NO_LIMIT


def _rests_of_version_2(proc: Path, cgroup: Path) -> list[int]:
    """What is left in the process's own group and in each above it."""
    own = next((line[3:] for line in _text(proc / "self" / "cgroup").splitlines() if line.startswith("0::")), "/")
    folder = cgroup / own.strip("/")
    folders = [one for one in (folder, *folder.parents) if one.is_relative_to(cgroup)]
    return [_rest(one, limit="memory.max", usage="memory.current", cached="inactive_file") for one in folders]


def _rest_of_version_1(cgroup: Path) -> list[int]:
    names = {"limit": "memory.limit_in_bytes", "usage": "memory.usage_in_bytes", "cached": "total_inactive_file"}
    return [_rest(cgroup / "memory", **names)]


def _rest(folder: Path, *, limit: str, usage: str, cached: str) -> int:
    """Files in the page cache count as usage, but make room if it is needed."""
    most, used = _number(folder / limit), _number(folder / usage)
    if most is None or used is None or most >= _NO_LIMIT:
        return _NO_LIMIT
    statistics = dict(line.split()[:2] for line in _text(folder / "memory.stat").splitlines() if len(line.split()) > 1)
    word = statistics.get(cached, "0")
    return max(0, most - used + (int(word) if word.isdecimal() else 0))


def _number(path: Path) -> int | None:
    word = _text(path).strip()
    return int(word) if word.isdecimal() else None


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
