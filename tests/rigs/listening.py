"""The addresses on which a process and its descendants accept connections, as the kernel lists them (proc(5))."""

import ipaddress
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from jobs.ranks import Ranks

POLL_SECONDS = 0.02
_LISTEN = "0A"  # include/net/tcp_states.h


def addresses_while(ranks: Ranks) -> set[str]:
    """Waits for the ranks and returns every address on which they or their descendants listened meanwhile."""
    found: set[str] = set()
    pause = threading.Event()
    while ranks.poll():
        for process in ranks.processes:
            found |= addresses_of(process.pid)
        pause.wait(POLL_SECONDS)
    return found


def addresses_of(pid: int) -> set[str]:
    """Addresses without ports, of a process tree; none if it has ended."""
    sockets = {number: address for name in ("tcp", "tcp6") for number, address in _listening(pid, name)}
    held = {number for process in (pid, *descendants(pid)) for number in _sockets_of(process)}
    return {address for number, address in sockets.items() if number in held}


def descendants(pid: int) -> Iterator[int]:
    """Children, their children, and so on."""
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield int(child)
                yield from descendants(int(child))


def _listening(pid: int, name: str) -> Iterator[tuple[str, str]]:
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == _LISTEN:
                yield rest[5], _address(local.partition(":")[0])


def _address(digits: str) -> str:
    """The kernel writes each group of four bytes in the machine's order."""
    groups = [bytes.fromhex(digits[at : at + 8])[::-1] for at in range(0, len(digits), 8)]
    return str(ipaddress.ip_address(b"".join(groups)))


def _sockets_of(pid: int) -> Iterator[str]:
    with suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                target = str(entry.readlink())
                if target.startswith("socket:["):
                    yield target[len("socket:[") : -1]
