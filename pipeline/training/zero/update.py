"""The update of ZeRO stages 1 and 2, which the host launches without waiting for the device.

DeepSpeed 0.19.8 makes the host wait twice in a step: for the sums after the backward pass, if they overlap it, and for
the gradient's norm, which decides about the update. The device then has nothing to do until the host has launched the
update, the gather and the next forward pass. Here, the norm stays on the device, and so does the decision: an update
whose norm is not finite changes nothing (as with torch's GradScaler, the optimiser's `found_inf` is then 1). The host
learns it with the loss, a step later. No GPU has run it yet: `patchline doctor --gpu` measures a step with and without
it.

`UpdateWithoutWaiting` replaces three methods of DeepSpeed's optimiser. Its partitions, their layout, its buckets and
its gather remain.

- `step`: the norm (`scaled_global_norm`) takes one sum over the ranks instead of one for each group. The flat gradient,
  the clipping (`unscale_and_clip_grads`), the step of each group and the gather follow as there. Loss scaling,
  offloading and experts are left out, since nothing here has them. So is `_update_model_bit16_weights`, which assigns
  `param.data` twice for each tensor: the tensors are views of what is gathered into, and nothing makes them anything
  else.
- `independent_gradient_partition_epilogue`: as there, but the stream that computes waits for the stream of the sums by
  an event, and the host does not.
- `_record_gradient_stream`: DeepSpeed sums a gradient that is larger than a bucket in place, on the other stream, and
  frees it at once. It tells the allocator so only if it offloads.
"""

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch

from pipeline.training.zero.optimizer import FOUND_INF
from pipeline.training.zero.sam import publish_perturbed
from pipeline.training.zero.state import sum_of_squares

_NO_PASS = -1  # DeepSpeed's INITIAL_MICRO_STEP_ID


class UpdateWithoutWaiting:
    """The methods of a DeepSpeedZeroOptimizer that replace its own. `step` sets `_global_grad_norm` to the norm before
    clipping, float32[] on the device. `is_discarded`: whether `step` leaves out the update. `climbs_by`: if above 0,
    `step` makes no update, but perturbs the model's weights by this distance (SAM). `is_perturbed`: whether the model
    has such weights."""

    is_discarded = False
    climbs_by = 0.0
    is_perturbed = False

    @torch.no_grad()
    def step(self: Any) -> None:
        """Makes one update of this rank's partitions, or perturbs the model's weights, and gathers the weights of all
        ranks. Collective."""
        from deepspeed import comm  # noqa: PLC0415  # the engine has loaded it

        self.micro_step_id = _NO_PASS
        gradients = [_flat(self.averaged_gradients.pop(number)) for number, _ in enumerate(self.bit16_groups)]
        self.zero_grad()
        squares = sum_of_squares(gradients)
        comm.all_reduce(squares, group=self.dp_process_group)
        norm = self._global_grad_norm = squares.sqrt().float()
        if self.climbs_by:
            publish_perturbed(self, gradients, norm, rho=self.climbs_by)
            self.is_perturbed = True
            return
        was_perturbed, self.is_perturbed = self.is_perturbed, False
        if self.is_discarded:
            if was_perturbed:
                self.update_lp_params()
            return
        setattr(self.optimizer, FOUND_INF, norm.isfinite().logical_not().float())
        factor = 1.0 / torch.clamp((norm + 1e-6) / self.clip_grad, min=1.0) if self.clip_grad else None
        for number, master in enumerate(self.single_partition_of_fp32_groups):
            master.grad = gradients.pop(0).to(master.dtype)  # in fp32, one group at a time
            if factor is not None:
                master.grad.mul_(factor)
            self._optimizer_step(number)
            master.grad = None
        self.update_lp_params()  # the gather

    def independent_gradient_partition_epilogue(self: Any) -> None:
        """Ends a backward pass: reduces what is left in the buckets, and keeps this rank's part. Collective."""
        accelerator = _accelerator()
        kept = vars(accelerator).get("synchronize")
        accelerator.synchronize = self.wait_for_sums
        try:
            super().independent_gradient_partition_epilogue()  # type: ignore[misc]
        finally:
            del accelerator.synchronize
            if kept:
                accelerator.synchronize = kept

    def _record_gradient_stream(self: Any, tensor: torch.Tensor, stream: Any) -> None:
        """Tells the allocator that a stream uses a gradient, whose memory it must not reuse before."""
        if not _accelerator().resolves_data_dependency():
            tensor.record_stream(stream)

    def wait_for_sums(self: Any) -> None:
        """Makes the stream that computes wait for the sums on the other one."""
        _accelerator().current_stream().wait_stream(self.reduction_stream)


def _accelerator() -> Any:
    from deepspeed.accelerator import get_accelerator  # noqa: PLC0415  # the engine has loaded it

    return get_accelerator()


def _flat(gradients: Iterable[torch.Tensor]) -> torch.Tensor:
    """Returns a group's gradients end to end, with padding. If micro-batches are added up in fp32, DeepSpeed already
    keeps them so."""
    flat: torch.Tensor | None = getattr(gradients, "flat_partition", None)
    return torch.cat([each.view(-1) for each in gradients]) if flat is None else flat


@cache
def class_without_waiting(kind: Any) -> type:
    """Returns a class derived from DeepSpeed's DeepSpeedZeroOptimizer whose updates do not wait."""
    return type(kind.__name__, (UpdateWithoutWaiting, kind), {})
