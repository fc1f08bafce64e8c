"""How much memory this host, and the control group of this process, still have. Pure but for reading /proc and /sys.

See proc(5) and the kernel's cgroup-v2.rst: a group's limit counts page cache, too, of which the inactive part can be
taken back at any time.
"""

import re
from pathlib import Path

_MEMINFO, _GROUPS, _MOUNT = Path("/proc/meminfo"), Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
_FILES = (  # limit, used, statistics with the reclaimable part: of version 2, then of version 1
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
_NOT_KNOWN = 1 << 60


def available_bytes(*, meminfo: Path = _MEMINFO, groups: Path = _GROUPS, mount: Path = _MOUNT) -> int:
    """Bytes that this process and its siblings may still take: the host's available memory, or the rest of the tightest
    group's limit; 1 << 60 if neither is known."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", _text(meminfo), re.MULTILINE)
    available = int(found[1]) << 10 if found else _NOT_KNOWN
    for folder in _group_folders(_text(groups), mount):
        available = min(available, _left_in(folder))
    return available


def _group_folders(groups: str, mount: Path) -> list[Path]:
    """The folders of the memory groups of this process, each with those above it. A container may see its own group at
    the top, in version 1 under another name than /proc has."""
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
    """Bytes up to the limit of one group; a very large number if it has none. Version 1 writes one near 1 << 63."""
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
