"""A process group of one rank that opens no socket: the exchanges of a rank with itself are copies.

Gloo and NCCL listen on a port even with one rank. The interface is that of `torch.distributed.ProcessGroup` in Python,
as in torch/testing/_internal/distributed/multi_threaded_pg.py: only what Patchline and DeepSpeed call.
"""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]  # its stub does not export it

_NAME = "alone"
_DEVICES = ["cpu", "cuda"]


def join_alone() -> None:
    """Makes this process the only member of torch.distributed's default group."""
    dist.Backend.register_backend(_NAME, _group, devices=_DEVICES)
    dist.init_process_group(_NAME, store=HashStore(), rank=0, world_size=1)


class _Done(dist.Work):
    """An exchange that has ended before it was asked for."""

    def wait(self, *_timeout: Any, **_options: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class _Alone(dist.ProcessGroup):
    """What each collective leaves in a rank's tensors if there is no other rank. Sums, means, minima and maxima over
    one rank are its own values. Names that torch 2.13 has replaced are those of earlier versions."""

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return _NAME

    def _stay(self, *_tensors: Any, **_options: Any) -> dist.Work:
        return _Done()

    def _start_coalescing(self, device: torch.device) -> None:
        """Nothing is put off."""

    def _copy(self, *tensors: Any, **_options: Any) -> dist.Work:
        """Of an output and an input, then options."""
        output, tensor = tensors[:2]
        with torch.no_grad():  # like a collective's kernel, which autograd does not see
            output.view(-1).copy_(tensor.reshape(-1))
        return _Done()

    def _copy_all(self, *lists: Any, **_options: Any) -> dist.Work:
        """Of lists of outputs and inputs: tensors, or lists of one tensor for each rank."""
        for output, tensor in zip(*lists[:2], strict=True):
            self._copy(_only(output), _only(tensor))
        return _Done()

    barrier = broadcast = reduce = allreduce = allreduce_coalesced = _stay
    _end_coalescing = _stay
    all_gather_single = reduce_scatter_single = _copy
    _allgather_base = _reduce_scatter_base = _copy
    allgather = reduce_scatter = all_gather_single_coalesced = reduce_scatter_single_coalesced = _copy_all
    allgather_into_tensor_coalesced = reduce_scatter_tensor_coalesced = _copy_all


def _only(tensor: Any) -> Any:
    if isinstance(tensor, list):
        (tensor,) = tensor
    return tensor


def _group(_store: object, rank: int, num_ranks: int, _timeout: timedelta) -> dist.ProcessGroup:
    return _Alone(rank, num_ranks)  # type: ignore[call-arg]  # of its two constructors, the stub has one
