"""Makes compiled blocks sum the gradients of biases where those gradients are computed, or where a norm reads them.

A bias's gradient is the sum over all tokens of a tensor that the backward pass computes anyway. Inductor writes that
tensor in one kernel and sums it in another, since the loops of the two differ, so the tensor is read once more. This
pass changes only the order of the sums, so that inductor fuses them (benchmarks/fusion_gpu.py has the numbers):

- A gradient is summed over the tokens of each image, then over images. The first of these sums has the loops of an
  elementwise operation on [B, N, W], so it joins the kernel that computes the gradient: that of GELU, or the copy of
  the gradients of q, k and v into one tensor.
- The gradient that a residual connection hands on is summed in the kernel of the norm beside it. That kernel reads this
  gradient, and sums those of the norm's own weight and bias over the same tokens (inductor's mix-order reduction).
  Inductor adds another sum to it only if both sums read the same tensor, so the sum here also reads the norm's
  gradient, times 0.

Sums are in fp32 and have a fixed order, as without this pass. If a norm's gradient has an infinity, the bias beside it
gets NaN; such a step is not finite anyway.

Shape letters: B images, N tokens, W width of the bias, T = B N.
"""

from pathlib import Path

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.pattern_matcher import stable_topological_sort
from torch.fx import Graph, Node

_aten = torch.ops.aten
_RESHAPES = (_aten.reshape.default, _aten.view.default)
_sum, _convert = _aten.sum.dim_IntList, torch.ops.prims.convert_element_type.default


class FuseBiasSums(CustomGraphPass):
    """A pass over the forward and the backward graph of a block (`post_grad_custom_pre_pass`)."""

    def __call__(self, graph: Graph) -> None:
        """Rewrites each sum over all tokens of a [T, W] tensor that was [B, N, ...] before."""
        for total in graph.find_nodes(op="call_function", target=_sum):
            source, num_leading = _summed_tokens(total)
            if source is None:
                continue
            with graph.inserting_before(total):
                wide = _added(graph, _convert, source, torch.float32)
                read_by_norm = _gradient_of_norm(graph, source)
                if read_by_norm is None:
                    first = _added(graph, _sum, wide, list(range(1, num_leading)))
                    summed = _added(graph, _sum, first, [0])
                else:
                    nothing = _added(graph, _aten.mul.Tensor, read_by_norm, 0.0)
                    wide = _added(graph, _aten.add.Tensor, wide, nothing)
                    summed = _added(graph, _sum, wide, list(range(num_leading)))
                rounded = _added(graph, _convert, summed, total.meta["val"].dtype)
                result = _added(graph, _aten.reshape.default, rounded, list(total.meta["val"].shape))
            total.replace_all_uses_with(result)
            graph.erase_node(total)
        stable_topological_sort(graph)  # a norm's gradient may be computed after the place of the old sum

    def __eq__(self, other: object) -> bool:
        """All instances are equal, so that equal models share their compiled code."""
        return isinstance(other, FuseBiasSums)

    def __hash__(self) -> int:
        return hash(FuseBiasSums)

    def uuid(self) -> bytes:
        """Returns what this pass adds to the key of inductor's cache."""
        return get_hash_for_files((str(Path(__file__)),))


def _summed_tokens(total: Node) -> tuple[Node | None, int]:
    """Returns the tensor whose reshaped form `total` sums over its first dimension, as it was before it was reshaped,
    and the number of its dimensions that count tokens; None if it counted them in one dimension."""
    if total.args[1] != [0]:
        return None, 0
    source, width = total.args[0], total.meta["val"].numel()
    while isinstance(source, Node) and source.target in _RESHAPES:
        source = source.args[0]
    if not isinstance(source, Node):
        return None, 0
    shape = source.meta["val"].shape
    for num_leading in range(2, len(shape)):
        if shape[num_leading:].numel() == width:
            return source, num_leading
    return None, 0


def _gradient_of_norm(graph: Graph, source: Node) -> Node | None:
    """Returns the gradient that a norm reads and sums for its own bias, in fp32 and as large as `source`, if what the
    norm makes of it is added to `source`; otherwise None."""
    terms = [term for user in source.users if user.target is _aten.add.Tensor for term in user.args]
    before = {node for term in terms if isinstance(term, Node) and term is not source for node in _needed(term)}
    shape = source.meta["val"].shape
    found = [
        node.args[0]
        for node in graph.find_nodes(op="call_function", target=_sum)
        if node.args[1] == list(range(len(shape) - 1)) and node.args[0] in before
    ]
    nearest = found[-1] if found else None
    return nearest if isinstance(nearest, Node) and nearest.meta["val"].shape == shape else None


def _needed(node: Node) -> set[Node]:
    """Returns the node and all nodes that it is computed from."""
    found, ahead = {node}, [node]
    while ahead:
        new = set(ahead.pop().all_input_nodes) - found
        found |= new
        ahead.extend(new)
    return found


def _added(graph: Graph, target: torch._ops.OpOverload, *arguments: object) -> Node:
    """Adds an operation to the graph, with its fake result, from which inductor takes shape and dtype."""
    node = graph.call_function(target, arguments)  # type: ignore[arg-type]
    node.meta["val"] = target(*(x.meta["val"] if isinstance(x, Node) else x for x in arguments))
    return node
