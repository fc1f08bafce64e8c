"""A rank's copy of its own state in host memory: the rank file, byte by byte, in memory that the writer shares.

Allocated and touched once, reused by every save. On a GPU it is pinned, and the copies run on a stream of their own.
"""

import mmap
import os
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from pipeline.checkpoints.fragments import RankFile
from pipeline.models.weights.safetensors import FLOAT_BYTES


class Copies(Protocol):
    """Copies that may still be running."""

    def is_done(self) -> bool:
        """Whether all bytes have arrived; asking costs nothing."""
        ...

    def wait(self) -> None:
        """Returns once they have."""
        ...

    def order(self) -> None:
        """What the device is asked from now on comes after the copies. The host waits for nothing."""
        ...


class DoneCopies:
    """Copies that were made at once."""

    def is_done(self) -> bool:
        """Always."""
        return True

    def wait(self) -> None:
        """At once."""

    def order(self) -> None:
        """Nothing is left to come first."""


class _CudaCopies:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def is_done(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        self._event.synchronize()

    def order(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)


def copy_out(
    views: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], stream: torch.cuda.Stream | None
) -> Copies:
    """Copies tensors into host memory. `stream`: of these copies alone, on a GPU; they begin after what the current
    stream was asked so far."""
    if stream is None:
        for view, target in zip(views, targets, strict=True):
            target.copy_(view)
        return DoneCopies()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for view, target in zip(views, targets, strict=True):
            target.copy_(view, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream)
    return _CudaCopies(event)


class HostBuffer:
    """Memory of `descriptor` (memfd_create(2)), for rank files of one size; a file of another size makes it anew."""

    def __init__(self, descriptor: int, device: torch.device) -> None:
        self._descriptor = descriptor
        self._stream = _stream_of(device)
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._head = b""
        self._is_pinned = False

    @property
    def num_bytes(self) -> int:
        """Of the rank file that it holds."""
        return self._bytes.numel()

    def fit(self, num_bytes: int) -> None:
        """Takes this much memory, all of it now. Ask host_memory.py first: if the host has less, the kernel ends a
        process. OSError if it cannot be mapped or pinned."""
        if num_bytes == self.num_bytes:
            return
        self._unpin()
        self._bytes, self._head = torch.empty(0, dtype=torch.uint8), b""
        os.ftruncate(self._descriptor, num_bytes)
        mapped = mmap.mmap(self._descriptor, num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self._bytes = torch.frombuffer(mapped, dtype=torch.uint8).zero_()  # written once, the first copy is no slower
        if self._stream is not None:
            _check(_cudart().cudaHostRegister(self._bytes.data_ptr(), num_bytes, 0))
            self._is_pinned = True

    def fill(self, file: RankFile) -> tuple[Copies, bool]:
        """Copies a rank's state in; True if the head differs from that of the file before, and so the pieces."""
        self.fit(file.head.num_bytes)
        is_new = self._head != file.head.data
        if is_new:
            self._head = file.head.data
            self._bytes[: len(self._head)] = torch.frombuffer(bytearray(self._head), dtype=torch.uint8)
        begins = [offset for _, _, offset, _, _ in file.pieces]
        ends = [begin + view.numel() * FLOAT_BYTES for begin, view in zip(begins, file.views, strict=True)]
        targets = [self._bytes[begin:end].view(torch.float32) for begin, end in zip(begins, ends, strict=True)]
        return copy_out(file.views, targets, self._stream), is_new

    def close(self) -> None:
        """Frees it."""
        self._unpin()
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def _unpin(self) -> None:
        if self._is_pinned:
            self._is_pinned = False
            _check(_cudart().cudaHostUnregister(self._bytes.data_ptr()))


def _stream_of(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _check(code: object) -> None:
    if int(code) != 0:  # type: ignore[call-overload]
        raise OSError(f"host memory cannot be pinned for the GPU: CUDA error {code}")
