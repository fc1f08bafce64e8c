"""A port to meet at on this machine."""

import socket


def free_port() -> int:
    """A loopback port that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
