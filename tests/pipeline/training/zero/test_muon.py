"""Muon's update is torch's own, also on matrices that ranks hold in parts; its momentum is in checkpoints, and what it
has no matrices for is refused."""

import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pipeline.checkpoints.manifest import manifest_from_json
from pipeline.models import ModelConfig, shapes_of
from pipeline.models.flops import num_block_weights
from pipeline.ranks.world import World
from pipeline.training.settings.job import OptimizerConfig
from pipeline.training.zero.flat_blocks import end_to_end, layout_of, sizes_of
from pipeline.training.zero.muon import is_orthogonalized, matrices_of, orthogonal, step_matrices
from shards.errors import UserError
from tests.rigs.processes import run_ranks
from tests.rigs.training import STEPS, FinishedRuns, losses, pretrain_words, resumed_steps, run

SHAPES = {
    "blocks.0.qkv.weight": (24, 8),
    "blocks.0.out.weight": (8, 8),
    "blocks.0.dense1.weight": (12, 8),
    "blocks.1.qkv.weight": (24, 8),
}
LAYOUT = layout_of(SHAPES, dict.fromkeys(SHAPES, "muon"))  # two flat tensors; the first one has padding
PLACES = tuple(end_to_end(LAYOUT, LAYOUT))
RATE, DECAY, MOMENTUM, NUM_UPDATES = 0.02, 0.1, 0.95, 3


def randoms(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def initial() -> list[torch.Tensor]:
    return [randoms(*shape, seed=number) for number, shape in enumerate(SHAPES.values())]


def gradients(update: int) -> list[torch.Tensor]:
    """Those of one update."""
    return [randoms(*shape, seed=100 + 10 * number + update) for number, shape in enumerate(SHAPES.values())]


def apart(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """With q, k and v as three matrices."""
    chunks = [each.chunk(num_matrices(name)) for name, each in zip(SHAPES, tensors, strict=True)]
    return [chunk.clone() for each in chunks for chunk in each]


def num_matrices(name: str) -> int:
    return 3 if "qkv" in name else 1


def in_places(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The tensors at their places in the group's flat partition, and zeros between them."""
    flat = torch.zeros(sum(sizes_of(LAYOUT).values()))
    for place, tensor in zip(PLACES, tensors, strict=True):
        flat[place.start : place.start + place.numel] = tensor.flatten()
    return flat


def after_torchs_updates() -> torch.Tensor:
    """The weights after a few updates of torch.optim.Muon, each at its place."""
    weights = [torch.nn.Parameter(each) for each in apart(initial())]
    optimizer = torch.optim.Muon(
        weights, lr=RATE, weight_decay=DECAY, momentum=MOMENTUM, adjust_lr_fn="match_rms_adamw"
    )
    for update in range(NUM_UPDATES):
        for weight, gradient in zip(weights, apart(gradients(update)), strict=True):
            weight.grad = gradient
        optimizer.step()  # type: ignore[no-untyped-call]
    parts = iter(weights)
    return in_places([torch.cat([next(parts).detach() for _ in range(num_matrices(name))]) for name in SHAPES])


def after_our_updates(world: World) -> torch.Tensor:
    """This rank's slice of the weights after as many updates of ours."""
    matrices = matrices_of(PLACES)
    size = -(-matrices[-1].end // world.num_ranks)

    def own(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        flat = torch.zeros(size * world.num_ranks)  # the end of the last slices is padding
        flat[: matrices[-1].end] = in_places(tensors)[: matrices[-1].end]
        return flat[world.rank * size : (world.rank + 1) * size].clone()

    weights, group = own(initial()), {"lr": RATE, "weight_decay": DECAY, "momentum": MOMENTUM}
    momentum = torch.zeros_like(weights)
    for update in range(NUM_UPDATES):
        gradient = own(gradients(update))
        step_matrices(weights, gradient, momentum, matrices=matrices, group=group, dtype=torch.bfloat16)
    return weights


@pytest.mark.parametrize(
    "num_ranks",
    [
        pytest.param(1, id="whole matrices"),
        pytest.param(3, id="cut ones and whole ones"),
        pytest.param(11, id="slices smaller than a matrix, and padding", marks=pytest.mark.long),
    ],
)
def test_updates_are_torchs_to_the_bit(num_ranks: int) -> None:
    """float32 weights with decay. The iteration is in bf16, as torch's always is."""
    found, expected = torch.cat(run_ranks(after_our_updates, num_ranks=num_ranks)), after_torchs_updates()
    assert torch.equal(found[: len(expected)], expected), "padding between matrices stays 0, too"
    assert not found[len(expected) :].any(), "padding stays 0"


def test_under_fp32_updates_are_nearer_to_exact_ones_than_torchs() -> None:
    """torch's iteration is in bf16 even for fp32 weights; ours is in the precision of the model."""
    matrices, group = matrices_of(PLACES), {"lr": RATE, "weight_decay": DECAY, "momentum": MOMENTUM}
    found = dict[torch.dtype, torch.Tensor]()
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        weights = in_places(initial())
        momentum = torch.zeros_like(weights)
        for update in range(20):
            gradient = in_places(gradients(update))
            step_matrices(weights, gradient, momentum, matrices=matrices, group=group, dtype=dtype)
        found[dtype] = weights
    exact = found[torch.float64]
    assert float((found[torch.float32] - exact).abs().max()) < 1e-5
    assert 1e-4 < float((found[torch.bfloat16] - exact).abs().max()) < 5e-3


@pytest.mark.parametrize("shape", [(16, 16), (12, 40), (40, 12)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_orthogonal_matrix_has_the_singular_vectors_and_no_singular_values(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    """They are near 1, which is all that Muon needs."""
    matrix = randoms(*shape, seed=1)
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    values = (u.T @ orthogonal(matrix.to(dtype)).float() @ vh.T).diagonal()
    assert float(values.min()) > 0.5
    assert float(values.max()) < 1.5


@pytest.mark.parametrize(
    "model",
    [
        pytest.param({"name": "vit_ti16"}, id="ViT"),
        pytest.param({"name": "vit_ti16", "representation": True}, id="with a hidden layer before the head"),
        pytest.param({"name": "vit_ti16", "position": "relative"}, id="with tables of positions in the blocks"),
        pytest.param(
            {"name": "vit_ti16", "qk_norm": True, "layer_scale": 0.1, "pooling": "attention", "position": "rope2d"},
            id="with norms of queries and keys, LayerScale and attention pooling",
        ),
        pytest.param({"name": "vit_ti16", "attention": "axial", "pooling": "average"}, id="with axial attention"),
        pytest.param({"name": "r50_vit_b16"}, id="hybrid"),
    ],
)
def test_matrices_of_blocks_are_muons(model: dict[str, Any]) -> None:
    """And nothing else: the patches' embedding, pooling, the head, norms, biases and convolutions are AdamW's."""
    config = ModelConfig(num_classes=3, **model)
    of_muon = {name: shape for name, shape in shapes_of(config).items() if is_orthogonalized(name)}
    assert {name.split(".", 2)[2] for name in of_muon} == {
        *("attention.qkv.weight", "attention.out.weight", "mlp.dense1.weight", "mlp.dense2.weight")
    }
    assert sum(map(math.prod, of_muon.values())) == num_block_weights(config)


def test_a_frozen_backbone_and_a_wrong_momentum_are_refused() -> None:
    with pytest.raises(UserError, match=r"'muon' with optimizer\.freeze_backbone: .* give --optimizer\.name adamw"):
        OptimizerConfig(name="muon", freeze_backbone=True)
    with pytest.raises(UserError, match=r"optimizer\.muon_momentum is 1\.0; allowed: 0 to below 1"):
        OptimizerConfig(name="muon", muon_momentum=1.0)


def continued(url: str, source: Path, run_dir: Path, *options: str, num_ranks: int) -> Path:
    """The run as a kill in its middle would have left it, continued to its end."""
    shutil.copytree(source, run_dir)
    (run_dir / "DONE").unlink()
    shutil.rmtree(run_dir / "weights")
    for folder in (run_dir / "checkpoints").glob("step-*"):
        if int(folder.name.removeprefix("step-")) > STEPS // 2:
            shutil.rmtree(folder)
    assert run(pretrain_words(url, run_dir, *options), num_ranks=num_ranks, log_dir=run_dir.parent) == 0
    assert resumed_steps(run_dir) == [0, STEPS // 2]
    return run_dir


@pytest.mark.slow
def test_a_run_continues_with_the_same_bits_and_on_one_rank_to_rounding(
    digits_url: str, finished_runs: FinishedRuns, tmp_path: Path
) -> None:
    """Two ranks cut matrices; one has them whole, and another stage. Each parameter has its own moments."""
    options = ("--optimizer.name", "muon", "--engine.precision", "fp32", "--ema-decay", "0.9")
    stage_2 = (*options, "--engine.zero-stage", "2")
    unbroken = finished_runs.get(2, *stage_2)
    (path,) = unbroken.glob(f"checkpoints/step-{STEPS:08d}/*/MANIFEST.json")
    for name, tensor in manifest_from_json(path.read_bytes()).tensors.items():
        moments = {"momentum_buffer"} if is_orthogonalized(name) else {"exp_avg", "exp_avg_sq"}
        assert set(tensor.slots) == {"master", "average"} | moments, name

    same = continued(digits_url, unbroken, tmp_path / "same" / "run", *stage_2, num_ranks=2)
    assert losses(same) == losses(unbroken)
    expected, found = (load_file(folder / "weights" / "model.safetensors") for folder in (unbroken, same))
    assert all(torch.equal(expected[name], found[name]) for name in expected)

    alone = continued(digits_url, unbroken, tmp_path / "alone" / "run", *options, num_ranks=1)
    assert list(losses(alone).values()) == pytest.approx(list(losses(unbroken).values()), abs=1e-4)
