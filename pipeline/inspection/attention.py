"""Computes where a Vision Transformer's attention looks: its weights, their reach, and their product over the layers.

Sources: "An Image is Worth 16x16 Words", section 4.5 and appendices D.7 (attention distance) and D.8 (attention
rollout: Abnar and Zuidema, "Quantifying Attention Flow in Transformers", 2020).

Shape letters: B images, h heads, N tokens (class token, patches), M patches, L layers, H W rows and columns of patches,
d width of a head.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from pipeline.models.layers import AttentionPool
from pipeline.models.positions import Grid
from pipeline.models.vit import Attention, AxialAttention, ViT

Shares = Callable[[int, torch.Tensor], None]
"""Takes the number of a layer and its attention weights, float32[B, h, N, N]: row i holds the weights
that token i gives to each token."""


def attention_weights(
    attention: Attention, z_BND: torch.Tensor, rotation_2Nd: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns the weights that a layer's attention gives its inputs, float32[B, h, N, N]; each row sums to 1.

    `rotation_2Nd`: the rotation of a model with rotary positions. Axial attention, whose input is [B, H, W, D], gives 0
    to the tokens of other rows, or of other columns.
    """
    if isinstance(attention, AxialAttention):
        return _of_all_tokens(_weights(attention, attention.lines(z_BND)), z_BND.shape[1:3], attention.by_column)
    return _weights(attention, z_BND, rotation_2Nd)


def _of_all_tokens(shares_ShLL: torch.Tensor, grid: Sequence[int], by_column: bool) -> torch.Tensor:
    """Returns float32[B, h, N, N] from the weights within each row, [B * H, h, W, W], or each column, [B * W, h, H,
    H]."""
    num_lines = grid[1] if by_column else grid[0]
    same_line = torch.eye(num_lines, device=shares_ShLL.device)
    shares = shares_ShLL.reshape(-1, num_lines, *shares_ShLL.shape[1:])
    # i and j: the row of a query and of its key; m and n: their columns
    spread = torch.einsum("bmhij,mn->bhimjn" if by_column else "bihmn,ij->bhimjn", shares, same_line)
    return spread.flatten(4, 5).flatten(2, 3)


def _weights(attention: Attention, z_BND: torch.Tensor, rotation_2Nd: torch.Tensor | None = None) -> torch.Tensor:
    qkv = attention.qkv(z_BND).reshape(*z_BND.shape[:2], 3, attention.num_heads, -1)
    # (B, N, 3, h, d) -> (3, B, h, N, d)
    q_BhNd, k_BhNd = (each.float() for each in attention.queries_and_keys(qkv.permute(2, 0, 3, 1, 4), rotation_2Nd))
    logits_BhNN = q_BhNd @ k_BhNd.mT * q_BhNd.shape[-1] ** -0.5
    if attention.relative is not None:
        logits_BhNN = logits_BhNN + attention.relative(q_BhNd)
    shares_BhNN: torch.Tensor = logits_BhNN.softmax(dim=-1)
    return shares_BhNN


def pool_weights(pool: AttentionPool, x_BMD: torch.Tensor) -> torch.Tensor:
    """Returns the weights that attention pooling gives the patches, as the mean over its heads: float32[B, M]."""
    q_Bh1d, k_BhMd, _ = (each.float() for each in pool.parts(x_BMD))
    shares_Bh1M: torch.Tensor = (q_Bh1d @ k_BhMd.mT * q_Bh1d.shape[-1] ** -0.5).softmax(dim=-1)
    return shares_Bh1M.mean(dim=1).squeeze(1)


def each_layer(model: ViT, images_BHW3: torch.Tensor, take: Shares) -> None:
    """Runs the model on images and passes `take` the attention weights of one layer at a time, since the weights of all
    layers would fill the memory. The model's output does not change."""

    def taken(number: int, module: Attention, inputs: tuple[torch.Tensor, ...]) -> None:
        take(number, attention_weights(module, *inputs))

    hooks = [
        block.attention.register_forward_pre_hook(partial(taken, number))  # type: ignore[union-attr]
        for number, block in enumerate(model.blocks)
    ]
    try:
        with torch.no_grad():
            model.features(images_BHW3)
    finally:
        for hook in hooks:
            hook.remove()


def distances(shares_BhNN: torch.Tensor, *, grid: Grid, stride: int, num_prefix_tokens: int) -> torch.Tensor:
    """Returns the mean attention distance in pixels (appendix D.7), float32[B, h]: from each patch to all patches,
    weighted by its attention and averaged over the patches.

    `stride`: the pixels from one patch to the next. The class token and registers have no place in the image, so they
    are left out, and the weights of the patches are scaled to sum to 1.
    """
    height, width = grid
    place_M2 = torch.cartesian_prod(torch.arange(height), torch.arange(width)).float().to(shares_BhNN.device)
    apart_MM = stride * torch.cdist(place_M2, place_M2)
    patches_BhMM = shares_BhNN[..., num_prefix_tokens:, num_prefix_tokens:]
    reached_BhM = (patches_BhMM * apart_MM).sum(-1) / patches_BhMM.sum(-1).clamp(min=torch.finfo(torch.float32).tiny)
    return reached_BhM.mean(-1)


def uniform_distance(grid: Grid, *, stride: int) -> float:
    """Returns the mean attention distance in pixels of a head that attends to all patches equally."""
    num_patches = grid[0] * grid[1]
    shares_11MM = torch.full((1, 1, num_patches, num_patches), 1 / num_patches)
    return float(distances(shares_11MM, grid=grid, stride=stride, num_prefix_tokens=0))


class Rollout:
    """Attention rollout (appendix D.8): the product over all layers of the attention weights, averaged over the heads.
    Half of each layer's weight is on the token itself, for the residual connection."""

    def __init__(self) -> None:
        self.product_BNN: torch.Tensor | None = None

    def add(self, shares_BhNN: torch.Tensor) -> None:
        """Multiplies the product by the weights of the next layer."""
        mean_BNN = shares_BhNN.mean(dim=1)
        own_NN = torch.eye(mean_BNN.shape[-1], device=mean_BNN.device)
        layer_BNN = (mean_BNN + own_NN) / 2  # rows still sum to 1
        self.product_BNN = layer_BNN if self.product_BNN is None else layer_BNN @ self.product_BNN

    def maps(
        self, *, grid: Grid, num_prefix_tokens: int, num_registers: int = 0, pooled_BM: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Returns how much of each patch is in the class token's output, float32[B, H, W], scaled to 0 to 1 in each
        image. With a distillation token, it is the mean of both tokens' outputs. Without a class token, the output is
        the mean of all patches, weighted by `pooled_BM` if it is given."""
        if self.product_BNN is None:
            raise ValueError("no layer was added")
        patches_BMN = self.product_BNN[:, num_prefix_tokens:]
        if pooled_BM is not None:
            taken_BN = (pooled_BM.unsqueeze(1) @ patches_BMN).squeeze(1)
        else:
            num_read = num_prefix_tokens - num_registers
            taken_BN = (self.product_BNN[:, :num_read] if num_read else patches_BMN).mean(dim=1)
        maps_BHW = taken_BN[:, num_prefix_tokens:].unflatten(1, grid)  # type: ignore[no-untyped-call]
        least, most = maps_BHW.amin((1, 2), keepdim=True), maps_BHW.amax((1, 2), keepdim=True)
        scaled: torch.Tensor = (maps_BHW - least) / (most - least).clamp(min=torch.finfo(torch.float32).tiny)
        return scaled


def looked_at(model: ViT, images_BHW3: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the mean attention distances of images in pixels, float32[L, B, h], and their rollout maps, float32[B, H,
    W]."""
    config, rollout, found = model.config, Rollout(), list[torch.Tensor]()
    grid = images_BHW3.shape[1] // config.stride, images_BHW3.shape[2] // config.stride

    def take(_: int, shares_BhNN: torch.Tensor) -> None:
        prefix = config.num_prefix_tokens
        found.append(distances(shares_BhNN, grid=grid, stride=config.stride, num_prefix_tokens=prefix).cpu())
        rollout.add(shares_BhNN)

    pooled = list[torch.Tensor]()
    hooks = []
    if model.pool is not None:
        hooks.append(model.pool.register_forward_pre_hook(lambda pool, x: pooled.append(pool_weights(pool, x[0]))))
    try:
        each_layer(model, images_BHW3, take)
    finally:
        for hook in hooks:
            hook.remove()
    maps_BHW = rollout.maps(
        grid=grid,
        num_prefix_tokens=config.num_prefix_tokens,
        num_registers=config.registers,
        pooled_BM=pooled[0] if pooled else None,
    )
    return torch.stack(found), maps_BHW.cpu()
