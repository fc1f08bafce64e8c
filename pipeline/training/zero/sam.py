"""SAM: the gradient of an update is taken at weights where the loss is higher, so that training finds flat minima.

Sources: "Sharpness-Aware Minimization for Efficiently Improving Generalization" (Foret et al., 2021, arXiv:2010.01412)
with google-research/sam (sam_jax/training_utils/flax_training.py), and "When Vision Transformers Outperform ResNets
without Pre-training or Strong Data Augmentations" (Chen et al., 2022, arXiv:2106.01548), whose first author says in
vision_transformer's issue 153 how he trained. With w the weights and L the loss of a batch:

    g1 = gradient of L at w,    e = rho g1 / (|g1| + 1e-12),    g2 = gradient of L at w + e

The optimiser then updates w, not w + e, with g2, which is clipped as without SAM. Both passes have the same images,
mixup, dropped branches and dropout. The 1e-12 is big_vision's (proj/gsam/gsam.py) and davda54/sam's;
google-research/sam adds nothing, and gets NaN from a gradient of 0.

Here, g1 is the gradient of the global batch: over all micro-batches and ranks, before clipping. Its norm is that of all
trained parameters together. So a run has the same results on any number of ranks. The sources' default is another: each
TPU core perturbs its own weights by the gradient of its own part of the batch ("m-sharpness", section 4.1 of Foret et
al., in which smaller parts generalise better). google-research/sam does what is done here with --sync_perturbations.
Chen et al. had 64 TPU chips for 4096 images, and advise a larger rho on fewer machines.

The masters keep w, so there is nothing to restore: only the model's own weights, which the passes use, become w + e,
rounded to the run's precision, until the update publishes them again. Checkpoints, averages and norms are made of the
masters. A step therefore costs a second pass over its batch and one more gather of the weights.
"""

from typing import Any

import torch
import torch.distributed as dist

_TINY = 1e-12


def publish_perturbed(zero: Any, gradients: list[torch.Tensor], norm: torch.Tensor, *, rho: float) -> None:
    """Gives the model of all ranks the weights w + e. `zero`: DeepSpeed's optimiser of stage 1. `gradients`: this
    rank's part of g1, one flat tensor for each group of parameters, which are freed one after the other. `norm`: |g1|,
    float32[] on the device. If it is not finite, all perturbed weights are NaN, so that the update is skipped.
    Collective."""
    from deepspeed.runtime.utils import all_gather_dp_groups  # noqa: PLC0415  # the engine has loaded it

    factor = torch.where(norm.isfinite(), rho / (norm + _TINY), torch.nan)
    rank = dist.get_rank()
    for number, master in enumerate(zero.single_partition_of_fp32_groups):
        perturbed = gradients.pop(0).to(master.dtype).mul_(factor).add_(master)
        zero.parallel_partitioned_bit16_groups[number][rank].copy_(perturbed)
    all_gather_dp_groups(
        groups_flat=zero.bit16_groups_flat,
        partitioned_param_groups=zero.parallel_partitioned_bit16_groups,
        dp_process_group=zero.real_dp_process_group,
        start_alignment_factor=zero.nccl_start_alignment_factor,
        allgather_bucket_size=zero.allgather_bucket_size,
    )
