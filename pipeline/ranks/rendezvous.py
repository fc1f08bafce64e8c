"""Where several ranks meet: the store that rank 0 serves, and the interface on which gloo listens.

Neither asks who connects, so each listens only at the address that the ranks share. Left to itself, torch's TCPStore
listens on every interface, and gloo on the one that the host's name resolves to.
"""

import errno
import fcntl
import ipaddress
import logging
import socket
import struct
from datetime import timedelta
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # its stub does not export it

from shards.errors import TransientError

log = logging.getLogger("patchline")

_BACKLOG = 4096  # connections that wait, of which the kernel allows net.core.somaxconn
_SIOCGIFADDR = 0x8915  # linux/sockios.h
_IPV6_ADDRESSES = Path("/proc/net/if_inet6")


def serve_store(address: str, port: int, *, num_ranks: int, timeout: timedelta) -> TCPStore:
    """Rank 0's store, at `address` only; returns once every rank has connected. TransientError if the port is taken."""
    return TCPStore(
        address,
        port,
        num_ranks,
        is_master=True,
        timeout=timeout,
        master_listen_fd=listen_at(address, port).detach(),  # the store closes it
    )


def listen_at(address: str, port: int) -> socket.socket:
    """A socket that listens where `address` says; on every interface, with a warning, if that is no address of this
    host at which others could find it. TransientError if the port is taken."""
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
    """The store that another process serves."""
    return TCPStore(address, port, num_ranks, is_master=False, timeout=timeout)


def interface_towards(address: str) -> str:
    """The network interface from which this host reaches `address`; empty if it cannot be told."""
    for family, place in _places(address, 1):
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(place)  # sends nothing
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
    """What the name resolves to, IPv6 first, as torch's clients try it; none if it does not resolve.

    Some systems resolve a host's own name to 127.0.1.1 there, which other hosts do not: that counts as unresolved.
    """
    try:
        found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    places = [(family, (str(place[0]), port)) for family, _, _, _, place in found]
    places = [place for place in places if _is_only_here(address) or not _is_only_here(place[1][0])]
    return sorted(places, key=lambda place: place[0] != socket.AF_INET6)


def _is_only_here(address: str) -> bool:
    """Whether it is a loopback address or `localhost`, which other hosts take for themselves."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return address.partition(".")[0] == "localhost"


def _addresses(interface: str) -> set[str]:
    """An interface's first IPv4 address and its IPv6 addresses."""
    found = set()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
            found.add(socket.inet_ntoa(answer[20:24]))
        except OSError:  # it has none
            pass
    if _IPV6_ADDRESSES.exists():
        for line in _IPV6_ADDRESSES.read_text().splitlines():
            digits, *_, name = line.split()
            if name == interface:
                found.add(str(ipaddress.IPv6Address(int(digits, 16))))
    return found
