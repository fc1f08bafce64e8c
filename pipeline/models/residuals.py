"""Makes blocks that are compiled for a GPU keep the sum after each residual for their backward pass.

For z + branch, inductor keeps the branch, since the block's input z is kept anyway, and adds the two again in each
kernel that reads the sum. Keeping the sum instead takes as much memory, but fewer bytes are read: the kernels of the
two norms' gradients no longer share z, so inductor fuses the kernels of one norm rather than parts of both
(benchmarks/fusion_gpu.py has the numbers). Inductor's CPU backend gains nothing from it, and needs two more kernels.
No GPU has run it yet: `patchline doctor --gpu` measures a step with and without it.
"""

from pathlib import Path

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

_aten = torch.ops.aten
_PRODUCTS = (_aten.addmm.default, _aten.mm.default)
# The operations that may be between a product and the sum: a reshape, a dropout's copy or mask, stochastic depth's
# factors.
_BETWEEN = (_aten.view.default, _aten.clone.default, _aten.mul.Tensor)


class KeepResiduals(CustomGraphPass):
    """A pass over the joint forward and backward graph, before inductor splits it (`joint_custom_pre_pass`)."""

    def __call__(self, graph: Graph) -> None:
        """Marks each sum that a norm reads as a tensor to keep, if the product in that sum then need not be kept, so
        that the block keeps the same number of bytes."""
        for norm in graph.find_nodes(op="call_function", target=_aten.var_mean.correction):
            total = norm.args[0]
            if total.target is torch.ops.prims.convert_element_type.default:
                total = total.args[0]
            if total.target is _aten.add.Tensor and any(_is_product_read_once(term) for term in total.args):
                total.meta["recompute"] = CheckpointPolicy.MUST_SAVE

    def __eq__(self, other: object) -> bool:
        """All instances are equal, so that equal models share their compiled code."""
        return isinstance(other, KeepResiduals)

    def __hash__(self) -> int:
        return hash(KeepResiduals)

    def uuid(self) -> bytes:
        """Returns what this pass adds to the key of inductor's cache."""
        return get_hash_for_files((str(Path(__file__)),))


def _is_product_read_once(node: object) -> bool:
    """Returns whether the node comes from a product and only the sum reads it. With LayerScale, for example, the
    gradient of the scale reads it, too."""
    if not isinstance(node, Node) or len(node.users) > 1:
        return False
    return node.target in _PRODUCTS or (node.target in _BETWEEN and any(map(_is_product_read_once, node.args)))
