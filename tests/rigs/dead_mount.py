"""A FUSE file system that answers nothing, mounted over a folder: like a file server that hangs.

Whoever looks for a file below the folder sleeps (process state S) until the mount is taken away or a signal kills it.
Files that are open already can still be used. Needs root and /dev/fuse; the protocol is that of linux/fuse.h.
"""

import ctypes
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_INIT, _VERSION = 26, (7, 31)
_FORCE_AND_DETACH = 3
_HEAD, _ANSWER = struct.Struct("<IIQ"), struct.Struct("<IiQ")  # length, opcode, id; length, error, id
_LIMITS = struct.Struct("<IIIIHHIIHHI28x")


def why_no_dead_mount() -> str:
    """Why nothing can be mounted here; empty if it can."""
    if os.getuid() != 0:
        return "needs root"
    return "" if os.access("/dev/fuse", os.R_OK | os.W_OK) else "needs /dev/fuse"


@contextmanager
def dead_mount(folder: Path) -> Iterator[None]:
    """Mounts it over the folder until the end of the block. OSError if that is not allowed."""
    libc = ctypes.CDLL(None, use_errno=True)
    server = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    try:
        options = f"fd={server},rootmode=40000,user_id=0,group_id=0,allow_other"
        if libc.mount(b"dead", os.fsencode(folder), b"fuse", 0, options.encode()):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(folder))
        try:
            _, opcode, number = _HEAD.unpack(os.read(server, 1 << 18)[: _HEAD.size])
            assert opcode == _INIT
            limits = _LIMITS.pack(*_VERSION, 1 << 16, 0, 12, 9, 1 << 16, 1, 0, 0, 0)
            os.write(server, _ANSWER.pack(_ANSWER.size + len(limits), 0, number) + limits)
            yield
        finally:
            libc.umount2(os.fsencode(folder), _FORCE_AND_DETACH)
    finally:
        os.close(server)
