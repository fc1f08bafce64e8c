"""Forward and backward passes over a rank's share of a batch, with the random draws of a step.

The draws are functions of (seed, step, place in the global batch) alone, made on the host and passed to the model, so
they do not depend on how the batch is divided among ranks and micro-batches. A run that resumes on any number of ranks
has the same draws, and so does a block that is compiled, or computed again in the backward pass. Only dropout draws on
the device, from a seed per rank and micro-batch.

Masked patch prediction (appendix B.1.2 of the ViT paper) corrupts the same number of patches in each image, by default
half of them: 80 % of these become the [mask] embedding, 10 % become another patch of the same image, and 10 % stay. The
paper does not say from which image the other patch comes; taking it from the same image needs no exchange between
ranks.

Stochastic depth (Huang et al., arXiv 1603.09382) leaves out branches of the transformer for each image: attention and
MLP of block l of L, each with the probability rate x l / (L - 1), l from 0, as in timm (drop_path_rate). A branch that
is kept is divided by the probability of being kept, so an evaluation uses all branches without factors.

PatchDropout (Liu et al., arXiv 2208.07220) leaves out the same number of patches of each image, after positions are
added (settings/tokens.py). Nothing makes up for the patches that are left out. timm draws them in another order and
returns them in a random one; here they keep their order, which changes results only by rounding.

FlexiViT (Beyer et al., arXiv 2212.08013; big_vision's trainers/proj/flexi/train.py) draws one patch size for all images
of a step, each size with the same probability.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from pipeline.data.batches import Batch
from pipeline.data.mixup import draw_mix
from pipeline.models.loss import targets_of, weighted_targets
from pipeline.models.masked import NOT_PREDICTED, masked_loss, masked_targets
from pipeline.models.vit import Kept
from pipeline.ranks.world import World
from pipeline.training.settings.job import TrainingJob
from pipeline.training.settings.tokens import num_patches_at, phase_at, phases_of, with_patch
from pipeline.training.teacher import Teacher, learned_loss
from pipeline.training.zero.batch_plan import BatchPlan
from pipeline.training.zero.engine import Engine
from pipeline.training.zero.step_times import StepTimes
from shards.hashing import DROPOUT, MASKED_PATCHES, PATCH_DROPOUT, PATCH_SIZES, STOCHASTIC_DEPTH, uniforms

_BRANCHES, _FEWEST_KEPT = 2, 2
_MASKED, _MASKED_OR_OTHER = 0.8, 0.9


def branch_factors(
    step: int, positions_in_batch: NDArray[np.int64], *, seed: int, rates: Sequence[float]
) -> NDArray[np.float32]:
    """Returns what each branch is multiplied by, 0 or 1 / (1 - its rate): float32[L, n, 2], attention first.

    `positions_in_batch`, int64[n]: places in the global batch. `rates`: each block's rate, from 0 to below 1.
    """
    depth = len(rates)
    if not rates or not 0 <= min(rates) <= max(rates) < 1:
        raise ValueError(f"rates are {rates}; allowed: one for each block, from 0 to below 1")
    rates_L11 = np.array(rates).reshape(-1, 1, 1)
    draws = uniforms(positions_in_batch, _BRANCHES * depth, key=STOCHASTIC_DEPTH.key(seed, step))
    # (n, L * 2) -> (L, n, 2)
    draws_Ln2 = draws.reshape(-1, depth, _BRANCHES).transpose(1, 0, 2)
    factors_Ln2: NDArray[np.float32] = np.where(draws_Ln2 >= rates_L11, 1 / (1 - rates_L11), 0.0).astype(np.float32)
    return factors_Ln2


def kept_images(factors_Ln2: NDArray[np.float32], block: int) -> list[NDArray[np.int64]]:
    """Returns the images that keep a block's attention, and the images that keep its MLP: at least two of each, unless
    there is only one image.

    Dropped images, whose factor is 0, are added to reach two: a parameter without a gradient would be missing from the
    sums over ranks, and torch.compile makes other kernels for a single image.
    """
    fewest = min(_FEWEST_KEPT, factors_Ln2.shape[1])
    found = []
    for of_branch in factors_Ln2[block].T:
        first_dropped = np.flatnonzero(of_branch == 0)[: max(0, fewest - np.count_nonzero(of_branch))]
        found.append(np.sort(np.concatenate([np.flatnonzero(of_branch), first_dropped])))
    return found


def patch_sources(
    step: int, positions_in_batch: NDArray[np.int64], *, seed: int, num_patches: int, num_corrupted: int
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Returns the source of each patch, int64[n, N], 0 to N - 1, or N for [mask]; and whether the patch is to be
    predicted, bool[n, N]. `positions_in_batch`, int64[n]: places in the global batch. Raises ValueError if there are
    fewer than 2 patches, since one may replace another, or if `num_corrupted` is not from 1 to their number."""
    if num_patches < 2 or not 1 <= num_corrupted <= num_patches:
        raise ValueError(
            f"num_patches is {num_patches} and num_corrupted {num_corrupted}; allowed: 2 or more, and 1 or more of them"
        )
    draws = uniforms(positions_in_batch, 3 * num_patches, key=MASKED_PATCHES.key(seed, step))
    order, kind, other = draws.reshape(-1, 3, num_patches).transpose(1, 0, 2)
    ranks = order.argsort(axis=1, kind="stable").argsort(axis=1, kind="stable")
    is_corrupted = ranks < num_corrupted
    own = np.arange(num_patches)
    others = (own + 1 + (other * (num_patches - 1)).astype(np.int64)) % num_patches  # any patch but itself
    replaced = np.where(kind < _MASKED, num_patches, np.where(kind < _MASKED_OR_OTHER, others, own))
    return np.where(is_corrupted, replaced, own), is_corrupted


def staying_patches(
    step: int, positions_in_batch: NDArray[np.int64], *, seed: int, num_patches: int, num_stay: int
) -> NDArray[np.int64]:
    """Returns the patches of each image that stay with PatchDropout, in rising order: int64[n, num_stay].
    `positions_in_batch`, int64[n]: places in the global batch. Raises ValueError if `num_stay` is not from 1 to
    `num_patches`."""
    if not 1 <= num_stay <= num_patches:
        raise ValueError(f"num_stay is {num_stay}; allowed: 1 to {num_patches}, the number of patches")
    draws = uniforms(positions_in_batch, num_patches, key=PATCH_DROPOUT.key(seed, step))
    return np.sort(draws.argsort(axis=1, kind="stable")[:, :num_stay], axis=1)


def drawn_patch(step: int, *, seed: int, patch_sizes: Sequence[int]) -> int | None:
    """Returns the patch size of a step, one of `patch_sizes`, each with the same probability; None if there are none:
    the model's own."""
    if not patch_sizes:
        return None
    draw = uniforms(np.zeros(1, dtype=np.int64), 1, key=PATCH_SIZES.key(seed, step))
    return patch_sizes[int(draw.item() * len(patch_sizes))]


def compiling_steps(job: TrainingJob, *, begin: int) -> frozenset[int]:
    """Returns the steps of a process, counted from 1, that may compile blocks again: the first one of each phase after
    the first phase and, if steps draw their patch sizes, the first one in a phase that draws a size. `begin`: the
    process's first step, counted from 0."""
    sizes, found, first = job.tokens.patch_sizes, {phase.end + 1 for phase in job.phases[:-1]}, begin
    for phase in job.phases if sizes else ():
        seen = set[int | None]()
        for step in range(first, phase.end):
            patch = drawn_patch(step, seed=job.seed, patch_sizes=sizes)
            if patch not in seen:
                found.add(step + 1)
                seen.add(patch)
            if len(seen) == len(sizes):
                break
        first = max(first, phase.end)
    return frozenset(found)


class Gradients:
    """Forward and backward passes over a rank's share of a batch. `times`: where the time of the passes is recorded.
    `class_weights`: float32[K], the factor of an image's loss for each class; None: no factors. `teacher`: the model to
    learn from; None: labels alone. `watched`: makes the context manager around each pass of the model, without the
    teacher's."""

    def __init__(
        self,
        job: TrainingJob,
        plan: BatchPlan,
        engine: Engine,
        world: World,
        *,
        times: StepTimes | None = None,
        class_weights: torch.Tensor | None = None,
        teacher: Teacher | None = None,
    ) -> None:
        self.job, self.plan, self.engine, self.world = job, plan, engine, world
        self.times = times or StepTimes()
        self.teacher = teacher
        self.watched: Callable[[], AbstractContextManager[None]] = nullcontext
        self.class_weights = None if class_weights is None else class_weights.to(world.device)

    def accumulate(self, batch: Batch, *, is_void: bool = False) -> torch.Tensor:
        """Adds up the gradients of all micro-batches in the engine. Returns their mean loss, still on the device. With
        SAM, the gradients are those at perturbed weights, while the loss is that of the model's own, as in big_vision.
        `is_void`: whether to make gradient and loss NaN, so that no rank makes an update."""
        taught = dict[int, torch.Tensor]()
        loss = self._pass_over(batch, taught, is_void=is_void)
        if self.job.optimizer.sam_rho:
            with self.times.part("optimizer"):
                self.engine.climb()
            self._pass_over(batch, taught, is_void=is_void)
        return loss

    def _pass_over(self, batch: Batch, taught: dict[int, torch.Tensor], *, is_void: bool) -> torch.Tensor:
        """Makes the forward and backward passes of all micro-batches. Returns their mean loss. All draws are those of
        the step, so a second pass has the same ones. `taught`: the teacher's logits of each micro-batch, which the
        first pass of SAM fills for the second, because the images and the teacher are the same."""
        losses = []
        for micro in range(self.plan.accumulation):
            chosen = slice(micro * self.plan.micro_batch, (micro + 1) * self.plan.micro_batch)
            with self.times.part("to_device"):
                images, targets = self.inputs(batch, chosen)
                branches, kept = self.branches(batch.step, chosen)
                stay = self.staying(batch.step, chosen)
                patch = self.patch(batch.step)
                given = {} if patch is None else {"patch": patch}
                sources: torch.Tensor | None = None
                if self.job.model.masked_patches:
                    sources, targets = self.masked(batch.step, chosen, images)
                is_plain = branches is None and sources is None and stay is None  # a ResNet takes only images
                more = () if is_plain else (branches, sources, kept, stay)
            taught_BK = taught.pop(micro, None)
            if self.teacher and taught_BK is None:
                with self.times.part("forward_backward"):
                    taught_BK = self.teacher.logits(images)
                if self.job.optimizer.sam_rho:
                    taught[micro] = taught_BK
            torch.manual_seed(DROPOUT.key(self.job.seed, batch.step, micro, self.world.rank) >> 1)

            def loss_of(
                model: nn.Module,
                x: tuple[torch.Tensor | Sequence[Kept | None] | None, ...] = (images, *more),
                given: dict[str, Any] = given,
                y: torch.Tensor = targets,
                taught_BK: torch.Tensor | None = taught_BK,
            ) -> torch.Tensor:
                if self.job.model.masked_patches:
                    loss = masked_loss(model(*x), y, target=self.job.model.masked_target)
                elif taught_BK is not None and self.job.model.distillation_token:
                    labelled_BK, distilled_BK = model(*x, heads_apart=True, **given).unbind(dim=1)
                    loss = learned_loss(self.job, labelled_BK, y, taught_BK, distilled_BK=distilled_BK)
                else:
                    loss = learned_loss(self.job, model(*x, **given), y, taught_BK)
                return loss * torch.nan if is_void else loss

            with self.times.part("forward_backward"), self.watched():
                losses.append(self.engine.accumulate(loss_of))
        return torch.stack(losses).mean()

    def inputs(self, batch: Batch, chosen: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns a micro-batch on the device: uint8 images, and their labels, or targets if labels or classes are
        weighted. With mixup or CutMix, returns the mixed images and targets."""
        device, mixup = self.world.device, self.job.data.mixup
        images = batch.images[chosen].to(device, non_blocking=True)
        labels = batch.labels[chosen].to(device, non_blocking=True)
        shares = None if batch.weights is None else batch.weights[chosen].to(device, non_blocking=True)
        num_classes, loss = self.job.model.num_classes, self.job.loss
        if not mixup.is_on and shares is None and self.class_weights is None:
            return images, labels
        if shares is None:
            targets = targets_of(labels, num_classes, name=loss)
        else:
            targets = weighted_targets(labels, shares, num_classes, name=loss)
        if self.class_weights is not None:
            targets = targets * self.class_weights
        if not mixup.is_on:
            return images, targets
        mix = draw_mix(
            batch.step, self._places(chosen), seed=self.job.seed, config=mixup, image_size=images.shape[1]
        ).on(self._on_device)
        return mix.images(images), mix.targets(targets, is_binary=mixup.binary_targets)

    def branches(self, step: int, chosen: slice) -> tuple[torch.Tensor | None, tuple[Kept | None, ...]]:
        """Returns the model's inputs for stochastic depth: the factors of its branches, float32[L, n, 2], and for each
        block that skips branches the images that keep them. Returns None and an empty tuple without stochastic
        depth."""
        model = self.job.model
        if not model.stochastic_depth:
            return None, ()
        factors = branch_factors(step, self._places(chosen), seed=self.job.seed, rates=model.branch_rates)
        skipping = [block for block, rate in enumerate(model.skipped_rates) if rate and self.job.engine.skip_branches]
        if not skipping:
            return self._on_device(factors), ()
        kept = [images for block in skipping for images in kept_images(factors, block)]
        sizes = [len(images) for images in kept]
        on_device = iter(torch.split(self._on_device(np.concatenate(kept)), sizes))  # a single copy, then views of it
        pairs = dict(zip(skipping, zip(on_device, on_device, strict=True), strict=True))
        return self._on_device(factors), tuple(pairs.get(block) for block in range(len(factors)))

    def staying(self, step: int, chosen: slice) -> torch.Tensor | None:
        """Returns the patches of each image that stay in a step, int64[n, S]. Returns None if all do."""
        job = self.job
        if not job.tokens.patch_dropout:
            return None
        model = with_patch(job.model, self.patch(step))
        phase = phase_at(step, phases_of(job.tokens, model, num_steps=job.steps))
        if phase.num_stay is None:
            return None
        num_patches = num_patches_at(phase.image_size, model)
        places, seed = self._places(chosen), self.job.seed
        return self._on_device(
            staying_patches(step, places, seed=seed, num_patches=num_patches, num_stay=phase.num_stay)
        )

    def patch(self, step: int) -> int | None:
        """Returns the patch size that a step draws; None: the model's own."""
        return drawn_patch(step, seed=self.job.seed, patch_sizes=self.job.tokens.patch_sizes)

    def masked(self, step: int, chosen: slice, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the source of each patch, int64[n, N], and the targets that the model is to predict, int[n, N, T]."""
        model = self.job.model
        sources, chosen_patches = patch_sources(
            step,
            self._places(chosen),
            seed=self.job.seed,
            num_patches=model.grid[0] * model.grid[1],
            num_corrupted=model.num_corrupted_patches,
        )
        is_predicted = self._on_device(chosen_patches)[:, :, None]
        targets = torch.where(is_predicted, masked_targets(images, model), NOT_PREDICTED)
        return self._on_device(sources), targets

    def _places(self, chosen: slice) -> NDArray[np.int64]:
        """Returns the places of these images in the global batch."""
        return np.arange(chosen.start, chosen.stop, dtype=np.int64) + self.world.rank * self.plan.rank_batch

    def _on_device(self, drawn: NDArray[np.generic]) -> torch.Tensor:
        """Copies what the host has drawn to the device. The host does not wait for the copy."""
        values, device = torch.from_numpy(drawn), self.world.device
        return (values.pin_memory() if device.type == "cuda" else values).to(device, non_blocking=True)
