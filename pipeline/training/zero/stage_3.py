"""Tells DeepSpeed's stage 3 to gather one block ahead, and replaces one of its functions.

Checked against DeepSpeed 0.19.8: `PartitionedParameterCoordinator` gathers weights in the order in which the first step
used them, and `reduce_scatter_coalesced` sums gradients.
"""

from typing import Any

import torch
import torch.distributed as dist


def gathered_ahead(block: int) -> dict[str, int]:
    """Returns the settings with which DeepSpeed gathers the weights of the next block while one is computed, and frees
    those of the last one, like FSDP. `block`: the elements of the largest block's gathered tensor.

    By default, it gathers as fast as it can up to 1e9 elements, and frees nothing that is used again within 1e9
    elements, so that ViT-H/14 would be kept as a whole. Tensors of at most 100,000 elements are kept on every rank in
    any case.
    """
    return {
        "stage3_prefetch_bucket_size": block,
        "stage3_max_live_parameters": 2 * block,
        # The last block's backward pass follows its forward pass, and needs no other gathering.
        "stage3_max_reuse_distance": block,
    }


@torch.no_grad()
def reduce_scatter_coalesced(tensors: list[torch.Tensor], group: Any = None) -> list[torch.Tensor]:
    """Averages gradients over ranks, and returns this rank's part of each, with the same bits as DeepSpeed's function
    of this name. That one cuts every tensor into a view for each rank, which on 512 ranks takes the host longer than
    the rest of the step; this one copies a tensor with at most two operations."""
    from deepspeed.runtime.comm.coalesced_collectives import _torch_reduce_scatter_fn  # noqa: PLC0415

    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    sizes = [-(-tensor.numel() // num_ranks) for tensor in tensors]
    if len(tensors) == 1 and tensors[0].numel() % num_ranks == 0:
        sent = tensors[0].view(num_ranks, -1)
    else:
        sent = tensors[0].new_empty(num_ranks, sum(sizes))  # padding keeps arbitrary values, which nobody reads
        for tensor, columns in zip(tensors, torch.split(sent, sizes, dim=1), strict=True):
            size = columns.shape[1]
            whole, rest = divmod(tensor.numel(), size)
            columns[:whole].copy_(tensor.view(-1)[: whole * size].view(whole, size))
            if rest:
                columns[whole, :rest].copy_(tensor.view(-1)[whole * size :])
    sent.div_(num_ranks)
    _torch_reduce_scatter_fn(sent.view(-1), sent[rank], group=group)
    own = (min(size, max(0, tensor.numel() - rank * size)) for tensor, size in zip(tensors, sizes, strict=True))
    return [part[:length] for part, length in zip(torch.split(sent[rank], sizes), own, strict=True)]
