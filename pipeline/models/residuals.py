"""Chooses what compiled blocks keep for their backward pass: on a GPU the sum after each residual and, with selective
recomputation (recompute.py), only what is expensive to compute again.

For z + branch, inductor keeps the branch, since the block's input z is kept anyway, and adds the two again in each
kernel that reads the sum. Keeping the sum instead takes as much memory, but fewer bytes are read: the kernels of the
two norms' gradients no longer share z, so inductor fuses the kernels of one norm rather than parts of both
(benchmarks/fusion_gpu.py has the numbers). Inductor's CPU backend gains nothing from it, and needs two more kernels.
Sums are found by the LayerNorms that read them; in a model with RMSNorms nothing is changed. No GPU has run it yet:
`patchline doctor --gpu` measures a step with and without it.

Inductor recomputes elementwise operations by itself, but keeps what a product reads in the backward pass: the outputs
of norms and of the GELU. Marked as operations to recompute, these are computed again in a kernel of the backward pass,
from the products and the norms' statistics. No GPU has run this, either.
"""

from pathlib import Path
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

_aten = torch.ops.aten
_convert = torch.ops.prims.convert_element_type.default
_PRODUCTS = (_aten.addmm.default, _aten.mm.default)
# The operations that may be between a product and the sum: a reshape, a dropout's copy or mask, stochastic depth's
# factors.
_BETWEEN = (_aten.view.default, _aten.clone.default, _aten.mul.Tensor)


class KeepResiduals(CustomGraphPass):
    """A pass over the joint forward and backward graph, before inductor splits it (`joint_custom_pre_pass`).

    `keeps_sums`: keep the sums after residuals. `recomputes`: keep only products, attention and small tensors.
    """

    def __init__(self, *, keeps_sums: bool = True, recomputes: bool = False) -> None:
        self._choice = keeps_sums, recomputes

    def __call__(self, graph: Graph) -> None:
        """Marks the operations of the forward pass to keep and to recompute."""
        keeps_sums, recomputes = self._choice
        if recomputes:
            _recompute_elementwise(graph)
        if keeps_sums:
            _keep_sums(graph)

    def __eq__(self, other: object) -> bool:
        """Instances with the same choice are equal, so that equal models share their compiled code."""
        return isinstance(other, KeepResiduals) and other._choice == self._choice

    def __hash__(self) -> int:
        return hash(self._choice)

    def uuid(self) -> bytes:
        """Returns what this pass adds to the key of inductor's cache."""
        return get_hash_for_files((str(Path(__file__)),), extra=str(self._choice))


def _keep_sums(graph: Graph) -> None:
    """Marks each sum that a norm reads as a tensor to keep, if the product in that sum then need not be kept, so that
    the block keeps the same number of bytes."""
    for norm in graph.find_nodes(op="call_function", target=_aten.var_mean.correction):
        total = norm.args[0]
        if total.target is _convert:
            total = total.args[0]
        if total.target is _aten.add.Tensor and any(_is_product_read_once(term) for term in total.args):
            total.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _recompute_elementwise(graph: Graph) -> None:
    """Marks each elementwise operation of the forward pass on which the backward pass depends as one to recompute,
    apart from dropout's masks, which are drawn only once, and small tensors, with one number for each token or image.

    The graph computes the same bits. On a CPU in bf16, inductor does not: there, the backward pass reads norms'
    statistics rounded to bf16, but a kernel that rounds them itself leaves that out."""
    backward, needed = set[Node](), set[Node]()
    for node in graph.nodes:
        if node.name.startswith("tangents") or backward.intersection(node.all_input_nodes):
            backward.add(node)
    for node in reversed(graph.nodes):
        if node.op != "output" and any(user in backward or user in needed for user in node.users):
            needed.add(node)
    for node in needed - backward:
        value: Any = node.meta.get("val")
        is_elementwise = node.target is _convert or torch.Tag.pointwise in getattr(node.target, "tags", ())
        if not is_elementwise or value.dtype == torch.bool:
            continue
        if value.dim() and value.shape[-1] != 1:
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE


def _is_product_read_once(node: object) -> bool:
    """Returns whether the node comes from a product and only the sum reads it. With LayerScale, for example, the
    gradient of the scale reads it, too."""
    if not isinstance(node, Node) or len(node.users) > 1:
        return False
    return node.target in _PRODUCTS or (node.target in _BETWEEN and any(map(_is_product_read_once, node.args)))
