"""Counts the bytes of all tensors that are alive at the same time, whatever frees or shares them."""

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, `peak` is the most bytes of storage that tensors made inside have had at once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
                self._add(tensor.untyped_storage())
        return found

    def _add(self, storage: torch.UntypedStorage) -> None:
        weak = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self._alive = {key: own for key, own in self._alive.items() if not _is_gone(own[0])}
        self._alive[weak.cdata] = weak, storage.nbytes()
        self.peak = max(self.peak, sum(num_bytes for _, num_bytes in self._alive.values()))


def _is_gone(storage: StorageWeakRef) -> bool:
    gone: bool = storage.expired()  # type: ignore[no-untyped-call]
    return gone
