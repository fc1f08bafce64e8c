"""Vision Transformer ("An Image is Worth 16x16 Words", equations 1 to 4), with the details of the authors' JAX code.

The distillation token and its head are DeiT's ("Training data-efficient image transformers & distillation through
attention", Touvron et al., 2021; DistilledVisionTransformer in facebookresearch/deit's models.py).

Shape letters: B images, H W pixels, P patch, N tokens (class token, patches), D width, C channels, M MLP width,
K classes (or kept images), S patches that stay, T tokens that a head reads, h heads, d width of a head.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.checkpoint import checkpoint

from pipeline.models.attention import attend, joined_heads, packed_heads
from pipeline.models.config import ModelConfig
from pipeline.models.layers import MLP, AttentionPool, LinearHead, centred, norm_layer
from pipeline.models.masked import ColourHead, Mask
from pipeline.models.patches import PatchEmbedding
from pipeline.models.positions import (
    Grid,
    Positions,
    RelativePositions,
    from_axes,
    position_tables,
    resample_axis_embeddings,
    resample_position_embeddings,
    rotated,
    rotations,
    sines,
)
from pipeline.models.resnet import HybridResNet

# The images for which a block's attention is computed, and the images for which its MLP is: int64[K] each.
Kept = tuple[torch.Tensor, torch.Tensor]


class ViT(nn.Module):
    """A plain Vision Transformer or a hybrid. It maps uint8[B, H, W, 3] images to float32[B, K] logits.

    `checkpoint_blocks`: keep only the input of each block and recompute the block in the backward pass. In training
    with stochastic depth, `branches_LB2` of `forward` holds the factors of each block's two branches for each image,
    and `kept_L` holds, for each block, the images for which its two branches are computed (None: all of them).
    `stay_BS`, int64, are the patches of each image that stay in training with PatchDropout; the blocks do not see the
    others. `patch` is the side in pixels of the patches into which a ViT without a ResNet cuts the images of this pass;
    None: the configuration's.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        size = config.size
        self.config, self.checkpoint_blocks = config, False
        self.embed = Embedding(config)
        self.blocks = nn.ModuleList(Block(config, number=number) for number in range(config.num_blocks))
        has_norm = config.last_norm != "none"
        self.norm = norm_layer(config, size.width) if has_norm else nn.Identity()
        self.pool = AttentionPool(config) if config.pooling == "attention" else None
        self.representation = nn.Linear(size.width, size.width) if config.representation else None
        if config.masked_patches:
            self.head: LinearHead = ColourHead(size.width, config.num_classes, constant=config.head_bias)
        else:
            self.head = LinearHead(size.width, config.num_classes, constant=config.head_bias)
        is_distilled = config.distillation_token
        self.head_dist = LinearHead(size.width, config.num_classes, constant=config.head_bias) if is_distilled else None

    def forward(
        self,
        images_BHW3: torch.Tensor,
        branches_LB2: torch.Tensor | None = None,
        sources_BN: torch.Tensor | None = None,
        kept_L: Sequence[Kept | None] = (),
        stay_BS: torch.Tensor | None = None,
        *,
        patch: int | None = None,
        heads_apart: bool = False,
    ) -> torch.Tensor:
        """Returns float32[B, K] logits or, for a model of masked patches, float32[B, patches, K]. `sources_BN` then
        says which patches replace the image's own (masked.py).

        The logits of a model with a distillation token are the mean of both heads'. With `heads_apart`, returns
        float32[B, 2, K]: those of the class token and those of the distillation token.
        """
        if isinstance(self.head, ColourHead):
            z_BND = self.tokens(images_BHW3, branches_LB2, sources_BN, kept_L)
            x_BD: torch.Tensor = self.norm(self._patches(z_BND))
        elif self.head_dist is not None:
            z_BND = self.tokens(images_BHW3, branches_LB2, kept_L=kept_L, stay_BS=stay_BS, patch=patch)
            x_BTD: torch.Tensor = self.norm(z_BND[:, : self.config.num_class_tokens])
            logits_BTK = torch.stack([self.head(x_BTD[:, 0]), self.head_dist(x_BTD[:, 1])], dim=1)
            return logits_BTK if heads_apart else logits_BTK.mean(dim=1)
        else:
            x_BD = self.features(images_BHW3, branches_LB2, kept_L, stay_BS, patch=patch)
        logits_BK: torch.Tensor = self.head(x_BD)
        return logits_BK

    def features(
        self,
        images_BHW3: torch.Tensor,
        branches_LB2: torch.Tensor | None = None,
        kept_L: Sequence[Kept | None] = (),
        stay_BS: torch.Tensor | None = None,
        *,
        patch: int | None = None,
    ) -> torch.Tensor:
        """Returns the image representation y of equation 4 (after the hidden tanh layer, if there is one): [B, D].
        With a distillation token, it is the mean of both tokens after the norm, as in timm."""
        z_BND = self.tokens(images_BHW3, branches_LB2, kept_L=kept_L, stay_BS=stay_BS, patch=patch)
        if self.config.distillation_token:
            y_BD: torch.Tensor = self.norm(z_BND[:, : self.config.num_class_tokens]).mean(dim=1)
        elif self.config.pooling == "token":
            y_BD = self.norm(z_BND[:, 0])  # equation 4
        elif self.pool is not None:
            y_BD = self.pool(self.norm(self._patches(z_BND)))
        elif self.config.last_norm == "pooled":
            y_BD = self.norm(self._patches(z_BND).mean(dim=1))
        else:
            y_BD = self.norm(self._patches(z_BND)).mean(dim=1)
        return y_BD if self.representation is None else torch.tanh(self.representation(y_BD))

    def _patches(self, z_BND: torch.Tensor) -> torch.Tensor:
        """Returns the tokens without the class token, the distillation token and registers."""
        num_before = self.config.num_prefix_tokens
        return z_BND[:, num_before:] if num_before else z_BND

    def tokens(
        self,
        images_BHW3: torch.Tensor,
        branches_LB2: torch.Tensor | None = None,
        sources_BN: torch.Tensor | None = None,
        kept_L: Sequence[Kept | None] = (),
        stay_BS: torch.Tensor | None = None,
        *,
        patch: int | None = None,
    ) -> torch.Tensor:
        """Returns all tokens after the last block: [B, N, D], or with PatchDropout those that stay."""
        mask = self.head.mask if isinstance(self.head, ColourHead) and sources_BN is not None else None
        embedded: tuple[torch.Tensor, torch.Tensor | None] = self.embed(images_BHW3, mask, sources_BN, stay_BS, patch)
        z_BND, again_1ND = embedded
        rotation_2Nd, stride = None, patch or self.config.stride
        if self.config.is_rotary:
            grid = images_BHW3.shape[1] // stride, images_BHW3.shape[2] // stride
            rotation_2Nd = rotations(self.config, grid, patch=patch, device=z_BND.device)
            if stay_BS is not None:  # (2, N, d) -> (2, B, prefix + S, d)
                rotation_2Nd = rotation_2Nd[:, _places(stay_BS, num_prefix_tokens=self.config.num_prefix_tokens)]
        # Nothing is recomputed in evaluations, or if the model is frozen.
        is_recomputed = self.checkpoint_blocks and z_BND.requires_grad
        is_axial = self.config.attention == "axial"
        if is_axial:
            rows, columns = (side // stride for side in images_BHW3.shape[1:3])
            z_BND = z_BND.reshape(-1, rows, columns, z_BND.shape[-1])  # (B, H, W, D), until the last block
            again_1ND = None if again_1ND is None else again_1ND.reshape(1, *z_BND.shape[1:])
        for number, block in enumerate(self.blocks):
            if again_1ND is not None and number:
                z_BND = z_BND + again_1ND
            inputs: tuple[torch.Tensor | Kept | None, ...] = (z_BND,)
            if branches_LB2 is not None or rotation_2Nd is not None:
                inputs = (z_BND, None if branches_LB2 is None else branches_LB2[number])
            if rotation_2Nd is not None:
                inputs = (*inputs, rotation_2Nd)
            kept = kept_L[number] if kept_L else None
            if kept is not None:
                # If the block is compiled: the number of images differs from step to step.
                if block._compiled_call_impl is not None or "computed" in vars(block):
                    for kept_K in kept:
                        torch._dynamo.maybe_mark_dynamic(kept_K, 0)
                inputs = (*inputs, *(None,) * (3 - len(inputs)), kept)
            z_BND = checkpoint(block, *inputs, use_reentrant=False) if is_recomputed else block(*inputs)
        return z_BND.flatten(1, 2) if is_axial else z_BND


class Embedding(nn.Module):
    """Equation 1: patches times E, the class token in front, position embeddings added.

    The distillation token follows the class token, and has a position, too.
    Registers follow the class token ("Vision Transformers Need Registers", Darcet et al., 2024); they have no position,
    as in DINOv2's code. If images have another grid than the configuration's, because of their size or that of their
    patches, learned position embeddings are resampled as in the paper. Fixed ones are computed for that grid, stretched
    onto the grid of an image of the configuration's size.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        size, resnet = config.size, config.resnet
        self.num_class_tokens, self.grid, self.stride = config.num_class_tokens, config.grid, config.stride
        self.resnet = HybridResNet(resnet, epsilons=config.resnet_epsilons) if resnet else None
        self.patch = PatchEmbedding(side=size.patch, channels=resnet.width if resnet else 3, width=size.width)
        self.patch_norm = norm_layer(config, size.width) if config.patch_norm else None
        self.class_token = nn.Parameter(torch.zeros(1, 1, size.width)) if self.num_class_tokens else None
        self.distillation_token = nn.Parameter(torch.zeros(1, 1, size.width)) if config.distillation_token else None
        self.registers = nn.Parameter(torch.zeros(1, config.registers, size.width)) if config.registers else None
        self.position, self.position_x, self.position_y = position_tables(config)
        self.dropout, self.is_shared = nn.Dropout(config.dropout), config.position_at == "layers_shared"
        self.has_sines, self.num_prefix_tokens = config.position == "sincos2d", config.num_prefix_tokens
        self.norm = norm_layer(config, size.width) if config.first_norm else None

    def forward(
        self,
        images_BHW3: torch.Tensor,
        mask: Mask | None = None,
        sources_BN: torch.Tensor | None = None,
        stay_BS: torch.Tensor | None = None,
        patch: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the tokens of uint8 or float[B, H, W, 3] images in 0..255, [B, N, D], and the positions that are
        added again before each layer but the first, [1, N, D] or None. `mask` corrupts the patches as `sources_BN`
        says. With `stay_BS`, only these patches and the tokens before them are returned (PatchDropout). `patch`: the
        side in pixels of the patches, if it is not the configuration's."""
        batch, height, width, _ = images_BHW3.shape
        stride = patch or self.stride
        if height % stride or width % stride or not height * width:
            raise ValueError(
                f"images of {height} x {width} px do not fit patches of {stride} px; give multiples of them"
            )
        x_BHWC = centred(images_BHW3, self.patch.weight.dtype)
        if self.resnet is not None:
            x_BHWC = self.resnet(x_BHWC)
        rows, columns, p = height // stride, width // stride, patch or self.patch.side
        # (B, H/P, P, W/P, P, C) -> (B, H/P * W/P, P * P * C)
        x_BNP = x_BHWC.reshape(batch, rows, p, columns, p, -1).transpose(2, 3).flatten(3).flatten(1, 2)
        z_BND: torch.Tensor = self.patch(x_BNP) if patch is None else self.patch(x_BNP, patch)
        if self.patch_norm is not None:
            z_BND = self.patch_norm(z_BND)
        if mask is not None:
            z_BND = mask(z_BND, sources_BN)
        if self.class_token is not None:
            own = (
                (self.class_token,) if self.distillation_token is None else (self.class_token, self.distillation_token)
            )
            z_BND = torch.cat([*(token.expand(batch, -1, -1) for token in own), z_BND], dim=1)
        positions_1ND = self.positions((rows, columns), patch=patch)
        if positions_1ND is not None:
            z_BND = z_BND + positions_1ND.to(z_BND.dtype)
        if self.registers is not None:
            first, registers_BRD = self.num_class_tokens, self.registers.expand(batch, -1, -1)
            z_BND = torch.cat([z_BND[:, :first], registers_BRD, z_BND[:, first:]], dim=1)
        # A copy, because ZeRO-3 frees the table itself when this returns.
        again_1ND = positions_1ND.to(z_BND.dtype, copy=True) if self.is_shared and positions_1ND is not None else None
        z_BND = self.dropout(z_BND)
        if stay_BS is not None:
            z_BND = staying(z_BND, stay_BS, num_prefix_tokens=self.num_prefix_tokens)
        return z_BND if self.norm is None else self.norm(z_BND), again_1ND

    def positions(self, grid: Grid, *, patch: int | None = None) -> torch.Tensor | None:
        """Returns the position embeddings for a grid (height, width in patches), [1, N, D], without registers; None if
        the model has none. `patch`: the side in pixels of the patches, if it is not the configuration's."""
        if self.position is not None:
            if grid == self.grid:
                return self.position
            return resample_position_embeddings(
                self.position[0], from_grid=self.grid, to_grid=grid, num_prefix_tokens=self.num_class_tokens
            ).unsqueeze(0)
        height, width = grid
        if self.has_sines:  # computed each time: a model built on the meta device would lose a buffer
            d, device = self.patch.out_features, self.patch.weight.device
            own_length = self.grid[0] * self.stride // (patch or self.stride)
            x_WD, y_HD = (sines(length, d, own_length=own_length, device=device) for length in (width, height))
            return from_axes(x_WD, y_HD, num_prefix_tokens=self.num_class_tokens)
        if self.position_x is None or self.position_y is None:
            return None
        x_WD = self.position_x if width == self.grid[1] else resample_axis_embeddings(self.position_x, length=width)
        y_HD = self.position_y if height == self.grid[0] else resample_axis_embeddings(self.position_y, length=height)
        return from_axes(x_WD, y_HD, num_prefix_tokens=self.num_class_tokens)


def staying(z_BND: torch.Tensor, stay_BS: torch.Tensor, *, num_prefix_tokens: int) -> torch.Tensor:
    """Returns the first tokens of each image, and the patches after them that stay: [B, prefix + S, D].

    Unlike `gather`, `index_select` keeps only the indices for the backward pass.
    """
    batch, num_tokens, width = z_BND.shape
    places_BS = _places(stay_BS, num_prefix_tokens=num_prefix_tokens)
    first_B1 = torch.arange(0, batch * num_tokens, num_tokens, device=z_BND.device).unsqueeze(1)
    # (B, N, D) -> (B * N, D) -> (B * S, D) -> (B, S, D)
    return z_BND.flatten(0, 1).index_select(0, (places_BS + first_B1).flatten()).reshape(batch, -1, width)


def _places(stay_BS: torch.Tensor, *, num_prefix_tokens: int) -> torch.Tensor:
    """Returns the places of an image's first tokens and of the patches after them that stay: int64[B, prefix + S]."""
    place_S = torch.arange(num_prefix_tokens, device=stay_BS.device)
    return torch.cat([place_S.expand(len(stay_BS), -1), stay_BS + num_prefix_tokens], dim=1)


class Block(nn.Module):
    """Equations 2 and 3: attention and MLP, each after a norm and with a residual connection. With stochastic depth,
    each branch is multiplied by a factor per image.

    If attention is axial, tokens are arranged in rows and columns, [B, H, W, D]. Blocks with an even number attend
    along rows, the others along columns. `recompute`: a context in which autograd keeps less (recompute.py).
    `rotation_2Nd` of `forward` is that of rotary positions, [2, B, N, d] with PatchDropout.
    """

    def __init__(self, config: ModelConfig, *, number: int = 0) -> None:
        super().__init__()
        size = config.size
        self.recompute: AbstractContextManager[None] | None = None
        self.positions = Positions(config) if config.position_at == "layers" and number else None
        self.norm1 = norm_layer(config, size.width)
        is_axial = config.attention == "axial"
        self.attention = AxialAttention(config, by_column=number % 2 == 1) if is_axial else Attention(config)
        self.norm2 = norm_layer(config, size.width)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)
        self.scale1, self.scale2 = (LayerScale(size.width) if config.layer_scale else None for _ in range(2))

    def forward(
        self,
        z_BND: torch.Tensor,
        branches_B2: torch.Tensor | None = None,
        rotation_2Nd: torch.Tensor | None = None,
        kept: Kept | None = None,
    ) -> torch.Tensor:
        if self.recompute is None or not z_BND.requires_grad:  # evaluations and frozen models keep nothing
            return self.with_branches(z_BND, branches_B2, rotation_2Nd, kept)
        with self.recompute:
            return self.with_branches(z_BND, branches_B2, rotation_2Nd, kept)

    def with_branches(
        self,
        z_BND: torch.Tensor,
        branches_B2: torch.Tensor | None,
        rotation_2Nd: torch.Tensor | None,
        kept: Kept | None,
    ) -> torch.Tensor:
        """Returns the tokens with what both branches add, [B, N, D]."""
        if self.positions is not None:
            z_BND = z_BND + self.positions().to(z_BND.dtype).reshape(z_BND.shape[1:])
        first_B11 = second_B11 = None
        if branches_B2 is not None:
            first_B11, second_B11 = branches_B2.to(z_BND.dtype).T.reshape(2, len(z_BND), *(1,) * (z_BND.dim() - 1))
        turns: tuple[torch.Tensor, ...] = () if rotation_2Nd is None else (rotation_2Nd,)
        if kept is None or first_B11 is None or second_B11 is None:  # equations 2 and 3
            z_BND = z_BND + _scaled(self.dropout(self.attention(self.norm1(z_BND), *turns)), self.scale1, first_B11)
            return z_BND + _scaled(self.mlp(self.norm2(z_BND)), self.scale2, second_B11)
        # The same, but only for the K images that keep a branch. DINOv2's code does so with the same K in every step.
        first_K, second_K = kept
        x_KND = z_BND.index_select(0, first_K)
        turns = tuple(each.index_select(1, first_K) if each.dim() == 4 else each for each in turns)
        added_KND = self.dropout(self.attention(self.norm1(x_KND), *turns))
        z_BND = z_BND.index_add(0, first_K, _scaled(added_KND, self.scale1, first_B11.index_select(0, first_K)))
        added_KND = self.mlp(self.norm2(z_BND.index_select(0, second_K)))
        return z_BND.index_add(0, second_K, _scaled(added_KND, self.scale2, second_B11.index_select(0, second_K)))


def _scaled(added_BND: torch.Tensor, scale: nn.Module | None, factor_B11: torch.Tensor | None) -> torch.Tensor:
    """Returns what a branch adds, multiplied by its LayerScale and by the factor of each image."""
    if scale is not None:
        added_BND = scale(added_BND)
    return added_BND if factor_B11 is None else factor_B11 * added_BND


class LayerScale(nn.Module):
    """A learned factor for each channel of a residual branch ("Going deeper with Image Transformers", Touvron et al.,
    2021; also in "DeiT III"). It is a separate module, because ZeRO-3 gathers parameters module by module."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.zeros(width))

    def forward(self, added_BND: torch.Tensor) -> torch.Tensor:
        """Returns the branch times the factors, [B, N, D]."""
        return added_BND * self.gamma


class Attention(nn.Module):
    """Multi-head self-attention (appendix A). q, k and v come from one product, after which there is no dropout
    (appendix B.1).

    `q_norm` and `k_norm` normalise each head's queries and keys ("Scaling Vision Transformers to 22 Billion
    Parameters", Dehghani et al., 2023, section 2). ViT-22B's are RMSNorms, which have no bias and do not subtract the
    mean. Here they are of the model's kind, LayerNorms by default, as in timm.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, self.num_heads = config.size.width, config.size.num_heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.relative = RelativePositions(config) if config.position == "relative" else None
        head_width = width // self.num_heads
        self.q_norm = norm_layer(config, head_width) if config.qk_norm else None
        self.k_norm = norm_layer(config, head_width) if config.qk_norm else None
        self.norm = norm_layer(config, width) if config.inner_norms == "both" else None

    def forward(self, z_BND: torch.Tensor, rotation_2Nd: torch.Tensor | None = None) -> torch.Tensor:
        qkv_3BhNd = packed_heads(self.qkv(z_BND), self.num_heads)
        a_BND = joined_heads(self.attended(qkv_3BhNd, rotation_2Nd))
        out_BND: torch.Tensor = self.out(a_BND if self.norm is None else self.norm(a_BND))
        return out_BND

    def attended(self, qkv_3BhNd: torch.Tensor, rotation_2Nd: torch.Tensor | None = None) -> torch.Tensor:
        """Returns each token's weighted sum of values, [B, h, N, d]. This is everything between the layer's two
        products."""
        if self.relative is None and self.q_norm is None and rotation_2Nd is None:
            return attend(qkv_3BhNd)
        q_BhNd, k_BhNd = self.queries_and_keys(qkv_3BhNd, rotation_2Nd)
        mask = None if self.relative is None else self.relative(q_BhNd)
        return F.scaled_dot_product_attention(q_BhNd, k_BhNd, qkv_3BhNd[2], attn_mask=mask)

    def queries_and_keys(
        self, qkv_3BhNd: torch.Tensor, rotation_2Nd: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the queries and keys to multiply, after norms and rotations, [B, h, N, d] each. In memory, tokens
        come before heads, so that the result of attention has the same layout and needs no copy."""
        q_BNhd, k_BNhd = qkv_3BhNd[0].transpose(1, 2), qkv_3BhNd[1].transpose(1, 2)
        if self.q_norm is not None and self.k_norm is not None:
            q_BNhd, k_BNhd = self.q_norm(q_BNhd), self.k_norm(k_BNhd)
        if rotation_2Nd is not None:
            q_BNhd, k_BNhd = rotated(q_BNhd, rotation_2Nd), rotated(k_BNhd, rotation_2Nd)
        return q_BNhd.transpose(1, 2), k_BNhd.transpose(1, 2)


class AttentionAlone(nn.Module):
    """The part of a layer's attention between its two products, from [3, B, h, N, d] to [B, h, N, d], where N is the
    number of all tokens of an image or, with PatchDropout, of those that stay. The kernels of attention are timed on
    it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        attention = Attention(config)
        self.attention, self.config = attention, config
        attention.qkv = attention.out = nn.Identity()  # type: ignore[assignment]

    def forward(self, qkv_3BhNd: torch.Tensor) -> torch.Tensor:
        config, (_, batch, _, num_tokens, _) = self.config, qkv_3BhNd.shape
        rotation_2Nd = rotations(config, config.grid, device=qkv_3BhNd.device) if config.is_rotary else None
        if rotation_2Nd is not None and num_tokens < rotation_2Nd.shape[1]:  # with PatchDropout, each image has its own
            rotation_2Nd = rotation_2Nd[:, None, :num_tokens].repeat(1, batch, 1, 1)
        return self.attention.attended(qkv_3BhNd, rotation_2Nd)


class AxialAttention(Attention):
    """Axial attention (appendix D.6) over [B, H, W, D]: each token attends to the tokens of its row or, with
    `by_column`, of its column.

    This follows the paper's text, since its code is not published. Scenic's projects/fast_vit/xvit.py, by one of the
    paper's authors, has the same two blocks and no class token. What Scenic calls row attention mixes the tokens of one
    column.
    """

    def __init__(self, config: ModelConfig, *, by_column: bool) -> None:
        super().__init__(config)
        self.by_column = by_column

    def forward(self, z_BHWD: torch.Tensor, rotation_2Nd: torch.Tensor | None = None) -> torch.Tensor:
        batch, height, width, d = z_BHWD.shape
        a_SND = super().forward(self.lines(z_BHWD), rotation_2Nd)
        if self.by_column:  # (B * W, H, D) -> (B, H, W, D)
            return a_SND.reshape(batch, width, height, d).transpose(1, 2)
        return a_SND.reshape(z_BHWD.shape)

    def lines(self, z_BHWD: torch.Tensor) -> torch.Tensor:
        """Returns each row or column as a separate sequence: [B * H, W, D] or [B * W, H, D]."""
        return (z_BHWD.transpose(1, 2) if self.by_column else z_BHWD).flatten(0, 1)
