"""A port on this machine for ranks to meet at."""

import socket


def free_port() -> int:
    """A loopback port that is free at the moment."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
