"""How much memory one rank may use on its device."""

from dataclasses import dataclass

import torch

from pipeline.ranks.host import available_bytes
from pipeline.ranks.world import World

# Of a GPU: the contexts of CUDA, cuBLAS and cuDNN and NCCL's buffers, and what the allocator cannot use because its
# free pieces are too small. [unverified]: nothing has been measured on a GPU; the first steps are tried before training
# (pipeline/training/fitting/first_pass.py).
_GPU_CONTEXT_BYTES, _GPU_FRAGMENTED = 2_000_000_000, 0.08
# Of a host, for each rank: libraries, and what malloc keeps. ViT-S/16 and B/16 needed 0.2 to 0.8 GB beside their
# tensors.
_LIBRARIES_BYTES, _HOST_FRAGMENTED = 500_000_000, 0.05


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Memory of a rank: of its device, or its share of the host's. `reserve` is not for tensors. `where` names it."""

    total_bytes: int
    reserve_bytes: int
    where: str

    @property
    def bytes(self) -> int:
        """What tensors may take."""
        return max(0, self.total_bytes - self.reserve_bytes)


def budget_of(world: World, *, read_ahead_bytes: int) -> Budget:
    """This rank's budget. `read_ahead_bytes`: the most that the data of all ranks on this host takes of the host."""
    if world.device.type == "cuda":
        properties = torch.cuda.get_device_properties(world.device)
        return gpu_budget(int(properties.total_memory), where=str(properties.name))
    return host_budget(available_bytes() - read_ahead_bytes, num_local_ranks=world.num_local_ranks)


def gpu_budget(total_bytes: int, *, where: str) -> Budget:
    """The budget of a GPU with this many bytes, as CUDA reports them."""
    reserve = _GPU_CONTEXT_BYTES + int(_GPU_FRAGMENTED * total_bytes)
    return Budget(total_bytes=total_bytes, reserve_bytes=reserve, where=where)


def host_budget(free_bytes: int, *, num_local_ranks: int) -> Budget:
    """A rank's share of the bytes that a host has left."""
    share = max(0, free_bytes) // num_local_ranks
    reserve = _LIBRARIES_BYTES + int(_HOST_FRAGMENTED * share)
    return Budget(total_bytes=share, reserve_bytes=reserve, where="this host")
