"""The cost of a model: its parameters and floating-point operations, computed exactly by formula.

The tests compare the formulas with what the modules do. A multiply-add is 2 operations. Only products count (dense
layers, convolutions, attention), as is usual. Training costs three times the forward pass.

With 303 million images per epoch, the formulas give the pre-training costs of the paper's Table 6; for its ResNets,
taps that fall on padding do not count (`skip_padding`). 10 of 18 rows agree to their rounding or within 0.2 %, and the
tests compare every row. No other tried way of counting gives all rows. The closest is XLA's cost analysis (of the
models in JAX, forward and backward, 8 images at a time), which the paper probably used. It also skips padding, but
counts additions, norms, activations and the standardising of weights: 12 rows agree, and all are within 0.4 % except
ViT-B/32 (1.8 % above), R50x1 (1.4 %) and R50+ViT-L/16 at 7 epochs (2.8 % below).

Shape letters: N tokens, D width, M MLP width.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from pipeline.models.config import ModelConfig, ResNetSize
from pipeline.models.resnet import same_padding, units_by_stage

FORWARD_AND_BACKWARD = 3
_TILE = 128


@dataclass(frozen=True, kw_only=True)
class Convolution:
    """One convolution of a ResNet: the map it reads (height, width), channels, kernel and stride."""

    map_size: tuple[int, int]
    channels_in: int
    channels_out: int
    kernel: int
    stride: int = 1

    def num_multiplies(self, *, skip_padding: bool) -> int:
        """Returns the multiply-adds for one image."""
        down, across = (self._num_taps(size, skip_padding=skip_padding) for size in self.map_size)
        return down * across * self.channels_in * self.channels_out

    def _num_taps(self, size: int, *, skip_padding: bool) -> int:
        """Counts the taps along one axis, summed over all positions of the output."""
        num_outputs = -(-size // self.stride)
        if not skip_padding:
            return num_outputs * self.kernel
        # BiT's padding is the mirror image of this, with as many taps.
        before, _ = same_padding(size, self.kernel, self.stride)
        starts = (output * self.stride - before for output in range(num_outputs))
        return sum(0 <= start + tap < size for start in starts for tap in range(self.kernel))


def forward_flops(
    config: ModelConfig, *, head: bool = True, skip_padding: bool = False, num_stay: int | None = None
) -> int:
    """Returns the operations of one image's forward pass. `num_stay`: the number of patches that stay with
    PatchDropout, which are embedded first; None: all of them."""
    resnet = config.resnet
    convolutions = convolutions_of(resnet, (config.image_size, config.image_size)) if resnet else ()
    num_multiplies = sum(convolution.num_multiplies(skip_padding=skip_padding) for convolution in convolutions)
    if config.is_bit and resnet:
        return 2 * (num_multiplies + head * resnet.width * config.num_classes)
    size, num_patches = config.size, math.prod(config.grid)
    num_staying = num_patches if num_stay is None else num_stay
    block = _block_multiplies(config, config.num_prefix_tokens + num_staying)
    num_multiplies += num_patches * size.patch**2 * (resnet.width if resnet else 3) * size.width
    num_multiplies += config.num_blocks * block + config.representation * size.width**2
    if config.pooling == "attention":  # keys, values, attention; then query, out and MLP
        num_multiplies += num_staying * 2 * (size.width**2 + size.width)
        num_multiplies += 2 * size.width**2 + 2 * size.width * size.mlp_width
    num_predicted = num_patches if config.masked_patches else config.num_classifiers
    num_multiplies += head * num_predicted * size.width * config.num_classes
    return 2 * num_multiplies + attention_flops(config, num_stay=num_stay)


def _block_multiplies(config: ModelConfig, num_tokens: int) -> int:
    """Returns the multiply-adds of a block's dense layers for one image."""
    size = config.size
    block = num_tokens * _num_matrix_weights(config)
    if config.position == "relative":  # q times the embeddings of all distances
        block += num_tokens * (2 * num_tokens - 1) * size.width
    return block


def _num_matrix_weights(config: ModelConfig) -> int:
    """Returns the number of elements of a block's matrices: q, k, v, out and the MLP."""
    d, m = config.size.width, config.size.mlp_width
    return 4 * d * d + (3 if config.mlp == "swiglu" else 2) * d * m


def attention_flops(config: ModelConfig, *, num_stay: int | None = None) -> int:
    """Returns the operations of attention's own products, queries times keys and weights times values. They grow faster
    than the number of tokens. `num_stay` is as in `forward_flops`. Returns 0 for BiT."""
    if config.is_bit:
        return 0
    rows, columns = config.grid
    num_tokens = config.num_prefix_tokens + (rows * columns if num_stay is None else num_stay)
    # An axial layer has two blocks: one attends along rows, the other along columns.
    num_seen = columns + rows if config.attention == "axial" else num_tokens
    return 2 * config.size.depth * 2 * num_tokens * num_seen * config.size.width


def attention_tiles(num_tokens: int) -> int:
    """Returns how many tiles of 128 tokens a GPU's kernel of attention computes, the last one as a whole. This function
    is pure. Kernels differ: with heads of width 80, FlashAttention-3 for Hopper takes 192 queries and 144 keys at a
    time in the forward pass, 64 and 128 in the backward pass (hopper/tile_size.h, flash_bwd_launch_template.h)."""
    return -(-num_tokens // _TILE)


def skipped_flops(config: ModelConfig, *, num_stay: int | None = None) -> int:
    """Returns the operations that stochastic depth saves on average in one image's forward pass, in blocks that skip
    branches (`ModelConfig.skipped_rates`). `num_stay` is as in `forward_flops`. Returns 0 for BiT, and without
    stochastic depth."""
    if config.is_bit or not config.stochastic_depth:
        return 0
    num_tokens = config.num_prefix_tokens + (math.prod(config.grid) if num_stay is None else num_stay)
    attention = attention_flops(config, num_stay=num_stay) // config.num_blocks
    block = 2 * _block_multiplies(config, num_tokens) + attention
    return round(block * sum(config.skipped_rates))


def training_flops(
    config: ModelConfig,
    *,
    head: bool = True,
    is_frozen: bool = False,
    skips_branches: bool = False,
    num_stay: int | None = None,
) -> int:
    """Returns the operations of one image's forward and backward passes.

    `is_frozen`: only the head and the hidden layer before it are trained, so the lower of the two computes no gradient
    for its input. `skips_branches`: leave out the operations of `skipped_flops`. `num_stay` is as in `forward_flops`.
    """
    skipped = skips_branches * skipped_flops(config, num_stay=num_stay)
    forward = forward_flops(config, head=head, num_stay=num_stay) - skipped
    if not is_frozen:
        return FORWARD_AND_BACKWARD * forward
    width = config.resnet.width if config.is_bit and config.resnet else config.size.width
    linear = 2 * head * config.num_classifiers * width * config.num_classes
    hidden = 2 * config.representation * width**2
    return forward + hidden + linear + (linear if hidden else 0)


def num_parameters(config: ModelConfig, *, head: bool = True) -> int:
    """Returns the number of parameters. If `head` is false, the hidden layer before the head is not counted either."""
    resnet = config.resnet
    total = _num_resnet_parameters(resnet, is_hybrid=not config.is_bit) if resnet else 0
    if config.is_bit and resnet:
        return total + 2 * resnet.width + head * (resnet.width + 1) * config.num_classes
    size, (height, width) = config.size, config.grid
    d, m = size.width, size.mlp_width
    block = _num_matrix_weights(config) + 5 * d + (2 if config.mlp == "swiglu" else 1) * m  # with biases
    of_norm = 1 if config.norm == "rmsnorm" else 2  # a scale, and a bias
    block += of_norm * 2 * d + (2 * d if config.layer_scale else 0)
    block += of_norm * 2 * d // size.num_heads if config.qk_norm else 0
    block += of_norm * m if config.inner_norms != "none" else 0
    block += of_norm * d if config.inner_norms == "both" else 0
    total += size.patch**2 * (resnet.width if resnet else 3) * d + d + config.num_blocks * block
    total += of_norm * d * (config.patch_norm + config.first_norm + (config.last_norm != "none"))
    total += config.num_prefix_tokens * d
    if config.pooling == "attention":  # the probe; query, key, value and out; the norm; the MLP
        total += d + 4 * (d * d + d) + of_norm * d + (d * m + m) + (m * d + d)
    num_tokens, num_tables = (  # the tokens that have a position, and the tables of positions
        config.num_class_tokens + height * width,
        config.num_blocks if config.position_at == "layers" else 1,
    )
    if config.has_table:
        total += num_tables * num_tokens * d
    elif config.position == "learned_2d":
        total += num_tables * (height + width) * d // 2
    elif config.position == "relative":
        total += size.depth * (2 * num_tokens - 1) * d
    # The hidden layer, or the [mask] embedding.
    hidden = d * d + d if config.representation else d * config.masked_patches
    return total + head * (hidden + config.num_classifiers * (d + 1) * config.num_classes)


def num_block_weights(config: ModelConfig) -> int:
    """Returns the number of elements of the matrices in a transformer's blocks; 0 for a BiT ResNet."""
    if config.is_bit:
        return 0
    return config.num_blocks * _num_matrix_weights(config)


def convolutions_of(resnet: ResNetSize, image: tuple[int, int]) -> Iterator[Convolution]:
    """Yields every convolution of a ResNet, in order, for images of (height, width) pixels."""
    yield Convolution(map_size=image, channels_in=3, channels_out=resnet.root_width, kernel=7, stride=2)
    at = _halved(_halved(image))  # once by the root's convolution, once by its pooling
    for unit in chain.from_iterable(units_by_stage(resnet)):
        channels, inner, outer, stride = unit.channels, unit.inner, unit.outer, unit.stride
        if unit.is_projected:
            yield Convolution(map_size=at, channels_in=channels, channels_out=outer, kernel=1, stride=stride)
        if unit.is_basic:
            yield Convolution(map_size=at, channels_in=channels, channels_out=outer, kernel=3, stride=stride)
            at = _halved(at) if stride == 2 else at
            yield Convolution(map_size=at, channels_in=outer, channels_out=outer, kernel=3)
            continue
        yield Convolution(map_size=at, channels_in=channels, channels_out=inner, kernel=1)
        yield Convolution(map_size=at, channels_in=inner, channels_out=inner, kernel=3, stride=stride)
        at = _halved(at) if stride == 2 else at
        yield Convolution(map_size=at, channels_in=inner, channels_out=outer, kernel=1)


def _halved(map_size: tuple[int, int]) -> tuple[int, int]:
    return -(-map_size[0] // 2), -(-map_size[1] // 2)


def _num_resnet_parameters(resnet: ResNetSize, *, is_hybrid: bool) -> int:
    """Counts the weights of convolutions, and a scale and a shift per normalised channel. BiT's last norm is not
    counted here."""
    total = sum(c.kernel**2 * c.channels_in * c.channels_out for c in convolutions_of(resnet, (1, 1)))
    num_normalised = resnet.root_width if is_hybrid else 0
    for unit in chain.from_iterable(units_by_stage(resnet)):
        if is_hybrid:  # each norm follows its convolution; the shortcut's does, too
            num_normalised += 2 * unit.inner + unit.outer + unit.is_projected * unit.outer
        else:  # each norm precedes its convolution
            num_normalised += unit.channels + (1 if unit.is_basic else 2) * unit.inner
    return total + 2 * num_normalised
