"""What this host offers a process: bf16 instructions, memory, and a free port.

PyTorch cannot tell whether a CPU computes bf16 with its own instructions. `torch.cpu` lists what the CPU has, even if
oneDNN was told not to use it. oneDNN claims to support bf16 on every CPU with AVX-512, although on some it converts
each number to fp32 and back.

Memory is read from /proc and the control groups; see proc(5) and the kernel's cgroup-v2.rst. A group's use includes
page cache, whose inactive part can be reclaimed at any time.
"""

import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_MEMINFO, _GROUPS, _MOUNT = Path("/proc/meminfo"), Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
_FILES = (  # (limit, use, name of the reclaimable part in memory.stat), for control groups of version 2 and 1
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
_NOT_KNOWN = 1 << 60
_LEAST_MAJOR = 8  # the major compute capability of the first GPUs with bf16 (Ampere)
# Values of ONEDNN_MAX_CPU_ISA: below AVX-512; AVX-512 without bf16; AVX-512 with bf16, but without AMX.
_BELOW_AVX512 = {"sse41", "avx", "avx2", "avx2_vnni", "avx2_vnni_2"}
_BELOW_BF16 = {"avx512_core", "avx512_core_vnni"}
_BELOW_AMX = {"avx512_core_bf16", "avx512_core_fp16"}


def free_port() -> int:
    """Returns a loopback port that is free at the moment."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def available_bytes(*, meminfo: Path = _MEMINFO, groups: Path = _GROUPS, mount: Path = _MOUNT) -> int:
    """Returns how many bytes this process and its siblings may still take: the host's available memory or, if it is
    less, what the tightest group's limit leaves. Returns 1 << 60 if neither is known."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", _text(meminfo), re.MULTILINE)
    available = int(found[1]) << 10 if found else _NOT_KNOWN
    for folder in _group_folders(_text(groups), mount):
        available = min(available, _left_in(folder))
    return available


def _group_folders(groups: str, mount: Path) -> list[Path]:
    """Returns the folders of this process's memory groups and of all groups above them. A container may see its own
    group at the top; in version 1, its path may then differ from the one in /proc."""
    found = [mount / "memory"]
    for line in groups.splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers not in ("", "memory"):
            continue
        root = mount / controllers if controllers else mount
        parts = [part for part in path.split("/") if part not in ("", "..")]
        found += [root.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]
    return found


def _left_in(folder: Path) -> int:
    """Returns how many bytes are left up to the limit of one group; a very large number if it has no limit, for which
    version 1 reports a limit near 1 << 63."""
    for limit_name, used_name, reclaimable in _FILES:
        limit, used = _text(folder / limit_name).strip(), _text(folder / used_name).strip()
        if limit.isdecimal() and used.isdecimal():
            found = re.search(rf"^{reclaimable} (\d+)$", _text(folder / "memory.stat"), re.MULTILINE)
            return max(0, int(limit) - int(used) + (int(found[1]) if found else 0))
    return _NOT_KNOWN


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


@dataclass(frozen=True, kw_only=True)
class Bf16:
    """Whether a device computes bf16 natively. `reason`: a clause that explains it, such as "this CPU computes bf16
    natively (AVX512-BF16)"."""

    is_native: bool
    reason: str


def bf16_of_gpu(name: str, *, capability: tuple[int, int]) -> Bf16:
    """Returns whether a GPU computes bf16 natively, from its name and compute capability."""
    number = f"compute capability {capability[0]}.{capability[1]}"
    if capability[0] >= _LEAST_MAJOR:
        return Bf16(is_native=True, reason=f"{name} computes bf16 natively ({number})")
    return Bf16(is_native=False, reason=f"{name} ({number}) emulates bf16, slower than fp32")


def bf16_of_cpu(flags: frozenset[str], environ: Mapping[str, str]) -> Bf16:
    """Returns whether a CPU computes bf16 natively, from its flags.

    Flags that the environment tells PyTorch or oneDNN not to use do not count: with ONEDNN_MAX_CPU_ISA or
    ATEN_CPU_CAPABILITY, a CPU acts like an older one. The factors in the reasons were measured with a training step of
    digits_smoke.
    """
    flags = _used(flags, environ)
    if "bf16" in flags:
        return Bf16(is_native=True, reason="this CPU computes bf16 natively (Arm BF16)")
    if "amx_bf16" in flags:
        return Bf16(is_native=True, reason="this CPU computes bf16 natively (AMX)")
    if "avx512_bf16" in flags:
        return Bf16(is_native=True, reason="this CPU computes bf16 natively (AVX512-BF16)")
    if "avx512f" in flags:
        return Bf16(is_native=False, reason="this CPU (AVX-512 without BF16) computes bf16 1.3 times slower than fp32")
    if "avx2" in flags:
        return Bf16(is_native=False, reason="this CPU (AVX2) computes bf16 8 times slower than fp32")
    return Bf16(is_native=False, reason="this CPU has no bf16 instructions and computes it several times slower")


def flags_of(cpuinfo: str) -> frozenset[str]:
    """Returns the flags in the text of /proc/cpuinfo: `flags` on x86, `Features` on Arm. Returns none if it has
    neither."""
    for line in cpuinfo.splitlines():
        name, _, words = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(words.split())
    return frozenset()


def _used(flags: frozenset[str], environ: Mapping[str, str]) -> frozenset[str]:
    """Returns the flags that PyTorch and oneDNN use. oneDNN's newer variable has precedence over DNNL_MAX_CPU_ISA, and
    the case of its value does not matter."""
    isa = (environ.get("ONEDNN_MAX_CPU_ISA") or environ.get("DNNL_MAX_CPU_ISA") or "").lower()
    if "sse2" not in flags:  # on Arm, these variables have no effect
        return flags
    if isa in _BELOW_AVX512 or environ.get("ATEN_CPU_CAPABILITY") in ("default", "avx2"):
        return frozenset(flag for flag in flags if not flag.startswith(("avx512", "amx")))
    if isa in _BELOW_BF16:
        return flags - {"avx512_bf16", "amx_bf16"}
    return flags - {"amx_bf16"} if isa in _BELOW_AMX else flags
