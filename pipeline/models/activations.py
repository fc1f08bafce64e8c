"""The memory that a forward pass keeps for its backward pass, computed exactly by formula. All functions are pure.

The tests compare it with what autograd saves, tensor by tensor, on models whose tensors have no values. The formulas
are for uncompiled blocks; a compiled block keeps less, since torch.compile recomputes what is cheap
(training/fitting/memory.py). Branches that stochastic depth skips are counted, too, since all images of a micro-batch
may happen to keep them.

Shape letters: N tokens, D width, M MLP width, h heads, K classes.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain

from pipeline.models.config import ModelConfig, ResNetSize
from pipeline.models.flops import convolutions_of
from pipeline.models.resnet import NUM_GROUPS, UnitSize, same_padding, units_by_stage
from pipeline.shared_settings import LossName, Recomputed

_FP32, _INT64 = 4, 8
_MOST_TOKENS_ON_CPU = 640  # up to here, attention.py computes bf16 gradients itself, and keeps no sums of the softmax


@dataclass(frozen=True, kw_only=True)
class Pass:
    """How a forward pass is computed.

    `element_bytes`: the bytes of one element, 2 for bf16 and 4 for fp32. `has_dense_targets`: whether images have a
    target for every class, as with mixup. `recomputed`: what the backward pass computes again. `is_frozen`: whether
    only the head is trained. `num_stay`: the number of patches of an image that stay with PatchDropout; None: all.
    """

    element_bytes: int
    loss: LossName = "softmax"
    has_dense_targets: bool = False
    recomputed: Recomputed = "off"
    is_frozen: bool = False
    is_on_gpu: bool = True
    num_stay: int | None = None


@dataclass(frozen=True, kw_only=True)
class Activations:
    """The bytes that a pass keeps: a number per image, and a fixed number that does not depend on the number of images.

    `working_bytes` and `fixed_working_bytes` are the most that its backward pass needs in addition, counted in the same
    way: the gradients of one block and, with activation checkpointing, the recomputed tensors that are held together:
    everything that a block keeps or, if it is recomputed selectively, its largest tensor.
    """

    image_bytes: int
    fixed_bytes: int
    working_bytes: int
    fixed_working_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class _Kept:
    """The bytes that one part of a model keeps, per image and fixed. For blocks, `input_bytes` says how many of them
    are the block's input, and `gradient_bytes` how many its gradients need in addition."""

    image_bytes: int
    fixed_bytes: int = 0
    input_bytes: int = 0
    gradient_bytes: int = 0


def activations_of(config: ModelConfig, how: Pass) -> Activations:
    """Returns the activations of a model at its image size."""
    blocks = [*_units(config, how), *_layers(config, how)]
    if how.is_frozen:  # the pass holds one part at a time; only the head and the loss keep anything
        last, loss = _last(config, how), _loss(config, how)
        passing = _passing(config, how)
        return Activations(
            image_bytes=last.image_bytes + loss.image_bytes,
            fixed_bytes=last.fixed_bytes + loss.fixed_bytes,
            working_bytes=max(part.image_bytes for part in passing),
            fixed_working_bytes=max(part.fixed_bytes for part in passing),
        )
    ends = [_root(config, how), _embedding(config, how), _last(config, how), _loss(config, how)]
    image_bytes, fixed_bytes = sum(end.image_bytes for end in ends), sum(end.fixed_bytes for end in ends)
    if how.recomputed != "full":
        return Activations(
            image_bytes=image_bytes + sum(block.image_bytes for block in blocks),
            fixed_bytes=fixed_bytes + sum(block.fixed_bytes for block in blocks),
            working_bytes=max(block.gradient_bytes for block in blocks),
        )
    return Activations(
        image_bytes=image_bytes + sum(block.input_bytes for block in blocks),
        fixed_bytes=fixed_bytes,
        working_bytes=max(block.image_bytes - block.input_bytes + block.gradient_bytes for block in blocks),
        fixed_working_bytes=max(block.fixed_bytes for block in blocks),
    )


def _layers(config: ModelConfig, how: Pass) -> list[_Kept]:
    """Counts the transformer blocks: both norms' inputs and outputs, q, k and v, the attention's result, and the MLP's
    hidden layer before and after its GELU. Selective recomputation keeps no outputs of norms and GELUs, unless another
    operation makes a new tensor of them: dropout, rotary positions, or the reordering of axial attention along
    columns."""
    if config.is_bit:
        return []
    size, num_tokens = config.size, _num_tokens(config, how)
    d, m = size.width, size.mlp_width
    is_relative = config.position == "relative"
    has_own_q_and_k = config.is_rotary or (config.qk_norm and not is_relative)
    num_seen = max(config.grid) if config.attention == "axial" else num_tokens
    is_by_pytorch = has_own_q_and_k or _keeps_softmax_sums(num_seen, how)  # its kernels keep the softmax's sums
    sums = _FP32 * size.num_heads if is_by_pytorch and not is_relative else 0
    masks = (2 * d + m) * _mask_bytes(config, how)
    factors = 2 * how.element_bytes if config.stochastic_depth else 0
    # LayerScale keeps what it scales. If attention has its own q and k, it keeps them beside the q and k of the
    # product.
    num_wide = 8 + (2 if config.layer_scale else 0) + (2 if has_own_q_and_k else 0)
    relative = _relative(config, how) if is_relative else _Kept(image_bytes=0)
    if is_relative:  # the product of q, k and v is kept for its norms alone, which keep no outputs
        num_wide += 1 if config.qk_norm else -2
    has_mlp_norm, has_attention_norm = config.inner_norms != "none", config.inner_norms == "both"
    num_wide += has_attention_norm
    num_norms = 2 + (2 * size.num_heads if config.qk_norm else 0) + has_mlp_norm + has_attention_norm
    num_hidden = _num_hidden(config) + has_mlp_norm
    inside = _inside_norms(
        config, how, num_norms=num_norms, num_channels=(2 + has_attention_norm) * d + has_mlp_norm * m
    )
    inside += _inside_norms(config, how, num_norms=0, num_channels=2 * d * config.qk_norm, is_input_kept=True)
    each_token = how.element_bytes * (num_wide * d + num_hidden * m) + inside + sums + masks
    # A layer whose branches skip images takes the rotations of the others, if each image has its own.
    turns = _turn_bytes(config, how) if config.stochastic_depth and how.num_stay is not None else 0
    layer = _Kept(
        image_bytes=num_tokens * each_token + factors + relative.image_bytes + turns,
        fixed_bytes=relative.fixed_bytes,
        input_bytes=how.element_bytes * num_tokens * d,
        gradient_bytes=how.element_bytes * num_tokens * (2 * d + (2 if config.mlp == "swiglu" else 1) * m),
    )
    if how.recomputed != "selective":
        return [layer] * config.num_blocks
    hidden, each = 0 if config.dropout and not has_mlp_norm else m, how.element_bytes * num_tokens
    # Attention reads the norms of q and k as they are, unless positions make new tensors of them.
    is_normed_last = config.qk_norm and not (config.is_rotary or is_relative)
    num_lost = 2 + has_attention_norm + (2 if is_normed_last else 0)
    # An RMSNorm that keeps its input in fp32 is recomputed from its input in bf16, which is as large as its output.
    is_widened = config.norm == "rmsnorm" and not how.is_on_gpu and how.element_bytes != _FP32
    lost = hidden + (0 if is_widened else num_lost) * d
    by_row = replace(
        layer,
        image_bytes=layer.image_bytes - each * lost,
        gradient_bytes=layer.gradient_bytes + each * max(hidden, d),
    )
    by_column = replace(by_row, image_bytes=by_row.image_bytes + each * d) if config.attention == "axial" else by_row
    return [by_column if number % 2 else by_row for number in range(config.num_blocks)]


def _inside_norms(
    config: ModelConfig, how: Pass, *, num_norms: int, num_channels: int, is_input_kept: bool = False
) -> int:
    """Counts what norms of a token keep beside their inputs and outputs: two statistics each or, as RMSNorms, one.

    On a CPU, PyTorch computes an RMSNorm in fp32 by several operations. They keep each channel as it is divided by the
    root and, in bf16, the input in fp32 instead of bf16, unless another operation keeps it (`is_input_kept`).
    """
    if config.norm == "layernorm":
        return 2 * num_norms * _statistic_bytes(how)
    if how.is_on_gpu:
        return num_norms * _FP32
    widened = 0 if how.element_bytes == _FP32 else _FP32 - (0 if is_input_kept else how.element_bytes)
    return num_norms * _FP32 + num_channels * (_FP32 + widened)


def _num_hidden(config: ModelConfig) -> int:
    """Returns how many tensors as wide as an MLP's hidden layer are kept: what the GELU reads, and its result. The
    quick GELU also keeps its sigmoid, and SwiGLU, which reads two, the SiLU of the gate."""
    return 4 if config.mlp == "swiglu" else 3 if config.gelu == "quick" else 2


def _passing(config: ModelConfig, how: Pass) -> list[_Kept]:
    """Counts what a pass that keeps nothing for a backward pass holds at once, in each part of the model. For blocks,
    it equals the measured peak, except with relative positions, for which it is an upper bound; for a ResNet it is an
    upper bound, 1.3 times what 32 images take and about twice what 2 images take."""
    parts = [_root(config, how), _pixels(config, how), _embedding(config, how), *_units(config, how)]
    if config.is_bit:
        return parts
    size, num_tokens = config.size, _num_tokens(config, how)
    # In both branches: the embedding's result, which the pass over the blocks holds, and the block's input. In front of
    # the MLP, the sum after attention and its norm; in the MLP, its hidden layer before and after the GELU.
    mlp = how.element_bytes * num_tokens * (4 * size.width + _num_hidden(config) * size.mlp_width)
    # The block's input after its norm; q, k and v; their product before and after the last dense layer.
    has_own_q_and_k = config.is_rotary or config.qk_norm
    attention = how.element_bytes * num_tokens * (8 + 2 * has_own_q_and_k) * size.width
    relative = _relative(config, how) if config.position == "relative" else _Kept(image_bytes=0)
    return [
        *parts,
        _Kept(image_bytes=mlp),
        _Kept(image_bytes=attention + relative.image_bytes, fixed_bytes=relative.fixed_bytes),
    ]


def _pixels(config: ModelConfig, how: Pass) -> _Kept:
    """Counts the pixels in fp32, before and after they are scaled to -1 to 1 (layers.py), and the tokens that are made
    of them, without and with those before the patches."""
    tokens = 0 if config.is_bit else 2 * how.element_bytes * _num_tokens(config, how) * config.size.width
    return _Kept(image_bytes=2 * _FP32 * 3 * config.image_size**2 + tokens)


def _relative(config: ModelConfig, how: Pass) -> _Kept:
    """Counts what attention with relative positions keeps in addition. Plain products keep the weights, q, k and v in
    fp32, also in bf16. The relative term keeps the scaled q, the embeddings, which are copied for each image, the
    logits of all distances, and the distance of each pair."""
    size, num_tokens = config.size, _num_tokens(config, how)
    each_distance = size.num_heads * num_tokens + size.width
    image_bytes = how.element_bytes * (2 * num_tokens - 1) * each_distance
    image_bytes += _FP32 * num_tokens * (size.num_heads * num_tokens + 3 * size.width)
    return _Kept(image_bytes=image_bytes, fixed_bytes=_INT64 * num_tokens**2)


def _keeps_softmax_sums(num_tokens: int, how: Pass) -> bool:
    return how.is_on_gpu or how.element_bytes == _FP32 or num_tokens > _MOST_TOKENS_ON_CPU


def _embedding(config: ModelConfig, how: Pass) -> _Kept:
    """Counts the patches, cut out of the image or of a hybrid's last map."""
    if config.is_bit:
        return _Kept(image_bytes=0)
    size, (height, width) = config.size, config.grid
    patches = height * width * size.patch**2 * (config.resnet.width if config.resnet else 3)
    # The last unit keeps its result, and patches of 1 x 1 are the same tensor. A root ends in a pool, which keeps only
    # its input.
    num_copies = 2 if config.resnet and config.resnet.units and size.patch > 1 else 1
    masks = (config.num_prefix_tokens + height * width) * size.width * _mask_bytes(config, how)
    turns = _turn_bytes(config, how)
    # Masked patch prediction keeps what patches are gathered from: all patches and the [mask] embedding.
    sources = config.masked_patches * how.element_bytes * (height * width + 1) * size.width
    # PatchDropout keeps the places of the tokens that stay, and each image has rotations of its own.
    places = 0 if how.num_stay is None else _INT64 * _num_tokens(config, how) + turns
    image = num_copies * how.element_bytes * patches + masks + sources + places
    # The inputs of both norms. The result of the second is the first block's.
    of_norm = how.element_bytes * size.width + _inside_norms(config, how, num_norms=1, num_channels=size.width)
    image += of_norm * (config.patch_norm * height * width + config.first_norm * _num_tokens(config, how))
    return _Kept(image_bytes=image, fixed_bytes=turns if how.num_stay is None else 0)


def _last(config: ModelConfig, how: Pass) -> _Kept:
    """Counts the last norm with its input, the hidden layer before the head, and the heads in fp32."""
    e, wide = how.element_bytes, how.element_bytes != _FP32
    if how.is_frozen:  # the inputs of the dense layers, and what the hidden layer's gradient needs
        width = config.resnet.width if config.is_bit and config.resnet else config.size.width
        hidden = config.representation * (1 + wide) * e * width
        fixed_bytes = config.representation * wide * _FP32 * width * config.num_classes
        return _Kept(image_bytes=hidden + config.num_classifiers * _FP32 * width, fixed_bytes=fixed_bytes)
    if config.is_bit and config.resnet:
        width = config.resnet.width
        kept = 2 * e * _area(_map_after(config.resnet, config)) * width + 2 * NUM_GROUPS * _statistic_bytes(how)
    else:
        width, num_tokens = config.size.width, _num_tokens(config, how)
        if config.masked_patches:
            num_patches = _area(config.grid)
            kept = e * num_tokens * width + _FP32 * num_patches * width
            kept += num_patches * _inside_norms(config, how, num_norms=1, num_channels=width)
            return _Kept(image_bytes=kept, fixed_bytes=wide * _FP32 * width * config.num_classes)
        is_token, is_of_tokens = config.pooling == "token", config.last_norm == "tokens"
        num_normed = config.num_classifiers  # a mean is one token, and each head reads one
        if config.last_norm == "none":
            num_normed = 0
        elif is_of_tokens and not is_token:
            num_normed = _num_staying(config, how)
        # The norm keeps all tokens that it reads some of. Without it, a token that the head reads as it is does the
        # same, and a mean keeps nothing.
        num_read = 1 if config.last_norm == "pooled" else num_tokens
        if config.last_norm == "none" and (wide or config.representation or not is_token):
            num_read = 0
        kept = e * num_read * width + num_normed * _inside_norms(config, how, num_norms=1, num_channels=width)
        kept -= config.num_classifiers * e * width if num_read and not num_normed else 0  # heads read some of these
        kept += config.representation * (1 + wide) * e * width
        if config.pooling == "attention":
            # The patches after the norm, their keys and values; the results of attention, of `out` and of the norm; the
            # MLP's hidden layer, before and after its GELU. All images share the query.
            kept += e * (3 * _num_staying(config, how) * width + 3 * width + 2 * config.size.mlp_width)
            kept += _FP32 * config.size.num_heads + _inside_norms(config, how, num_norms=1, num_channels=width)
            fixed = e * width + wide * _FP32 * width * config.num_classes
            return _Kept(image_bytes=kept + _FP32 * width, fixed_bytes=fixed)
    of_heads = config.num_classifiers * _FP32 * width
    return _Kept(image_bytes=kept + of_heads, fixed_bytes=wide * of_heads * config.num_classes)


def _loss(config: ModelConfig, how: Pass) -> _Kept:
    """Counts what the loss keeps of the logits (pipeline/models/loss.py)."""
    num_kept = {("softmax", False): 1, ("softmax", True): 2, ("sigmoid", False): 2, ("sigmoid", True): 4}
    num_predicted = _area(config.grid) if config.masked_patches else 1
    if config.masked_patches and config.masked_target == "pixels":  # the differences, and which of them count
        return _Kept(image_bytes=num_predicted * (_FP32 * config.num_classes + 1))
    return _Kept(image_bytes=num_predicted * num_kept[how.loss, how.has_dense_targets] * _FP32 * config.num_classes)


def _root(config: ModelConfig, how: Pass) -> _Kept:
    """Counts a ResNet's first convolution and its pooling, which keeps the place of each maximum."""
    resnet = config.resnet
    if resnet is None:
        return _Kept(image_bytes=0)
    root, after = resnet.root_width, _half(config.image_size)
    (convolution, *_), e = convolutions_of(resnet, (config.image_size, config.image_size)), how.element_bytes
    if config.is_bit:
        maps = 3 * config.image_size**2 + root * (after + 2) ** 2
    else:
        maps = 3 * _padded(config.image_size, 7, 2) ** 2 + 2 * root * after**2 + root * _padded(after, 3, 2) ** 2
    kept = e * maps + _INT64 * root * _half(after) ** 2 + (not config.is_bit) * 2 * NUM_GROUPS * _statistic_bytes(how)
    return _Kept(image_bytes=kept, fixed_bytes=_standardised(root, 7**2 * convolution.channels_in, how))


def _units(config: ModelConfig, how: Pass) -> Iterator[_Kept]:
    """Yields what each of a ResNet's units keeps, in order."""
    if config.resnet is None:
        return
    before = _half(_half(config.image_size))
    for unit in chain.from_iterable(units_by_stage(config.resnet)):
        after = _half(before) if unit.stride == 2 else before
        count = _pre_activation if config.is_bit else _post_activation
        e, (elements, num_norms) = how.element_bytes, count(unit, before, after)
        inner, outer = unit.inner, unit.outer
        if unit.is_basic:
            fixed = _standardised(outer, 9 * unit.channels, how) + _standardised(outer, 9 * outer, how)
        else:
            fixed = _standardised(inner, unit.channels, how) + _standardised(inner, 9 * inner, how)
            fixed += _standardised(outer, inner, how)
        fixed += unit.is_projected * _standardised(outer, unit.channels, how)
        input_elements = unit.channels * before**2
        yield _Kept(
            image_bytes=e * (input_elements + elements) + 2 * num_norms * NUM_GROUPS * _statistic_bytes(how),
            fixed_bytes=fixed,
            input_bytes=e * input_elements,
            gradient_bytes=e * (2 * max(outer * after**2, input_elements) + inner * before**2),
        )
        before = after


def _post_activation(unit: UnitSize, before: int, after: int) -> tuple[int, int]:
    """Returns the number of elements that a hybrid's bottleneck keeps beside its input, and its number of norms.
    `before` and `after` are the sides of the maps that it reads and writes.

    The elements are the results of convolutions and ReLUs, and padded copies. The last ReLU's result is not counted: it
    is the next unit's input.
    """
    first = 2 * unit.inner * before**2 + unit.inner * _padded(before, 3, unit.stride) ** 2
    second = 2 * unit.inner * after**2 + unit.outer * after**2
    if not unit.is_projected:
        return first + second, 3
    return first + second + unit.channels * _padded(before, 1, unit.stride) ** 2 + unit.outer * after**2, 4


def _pre_activation(unit: UnitSize, before: int, after: int) -> tuple[int, int]:
    """Returns the same numbers as `_post_activation`, for a unit of BiT, whose convolutions pad without a copy."""
    if unit.is_basic:
        return unit.channels * before**2 + 2 * unit.outer * after**2, 2
    return (unit.channels + 2 * unit.inner) * before**2 + 2 * unit.inner * after**2, 3


def _standardised(channels_out: int, num_weights_each: int, how: Pass) -> int:
    """Returns the fixed bytes of a standardised weight: its centred and its standardised values, two fp32 statistics
    per channel and, in bf16, an fp32 copy of the weight."""
    each = 2 * _FP32 if how.element_bytes == _FP32 else 2 * _FP32 + how.element_bytes
    return channels_out * (num_weights_each * each + 2 * _FP32)


def _statistic_bytes(how: Pass) -> int:
    """Returns the bytes of a norm's mean or deviation, which is fp32 on a GPU."""
    return _FP32 if how.is_on_gpu else how.element_bytes


def _mask_bytes(config: ModelConfig, how: Pass) -> int:
    """Returns the bytes of dropout's mask per element: 1 on a GPU, the element's own size on a CPU, 0 without
    dropout."""
    return 0 if not config.dropout else 1 if how.is_on_gpu else how.element_bytes


def _turn_bytes(config: ModelConfig, how: Pass) -> int:
    """Returns the bytes of the rotations of all tokens; 0 without rotary positions."""
    size = config.size
    return 2 * _FP32 * _num_tokens(config, how) * size.width // size.num_heads if config.is_rotary else 0


def _num_tokens(config: ModelConfig, how: Pass) -> int:
    """Returns the number of tokens that the blocks see."""
    return config.num_prefix_tokens + _num_staying(config, how)


def _num_staying(config: ModelConfig, how: Pass) -> int:
    return _area(config.grid) if how.num_stay is None else how.num_stay


def _map_after(resnet: ResNetSize, config: ModelConfig) -> tuple[int, int]:
    """Returns the size of the last feature map. Unlike the grid, the size is rounded up at each halving."""
    side = config.image_size
    for _ in range(resnet.num_halvings):
        side = _half(side)
    return side, side


def _area(size: tuple[int, int]) -> int:
    return size[0] * size[1]


def _half(side: int) -> int:
    return -(-side // 2)


def _padded(side: int, kernel: int, stride: int) -> int:
    return side + sum(same_padding(side, kernel, stride))
