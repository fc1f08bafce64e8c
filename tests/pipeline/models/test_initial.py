"""The statistics of initial weights: every kind of tensor as in the paper's JAX code."""

import math
from typing import Any

import pytest
import torch

from pipeline.models import ModelConfig, build_model, shapes_of
from pipeline.models.config import NAMES
from pipeline.models.initial import initial_tensor
from tests.pipeline.models.test_vit import TINY

D, M = 256, 1024  # width and MLP width


def tensor(name: str, *shape: int, seed: int = 0) -> torch.Tensor:
    return initial_tensor(name, shape, seed=seed)


def assert_uniform(values: torch.Tensor, bound: float) -> None:
    assert float(values.abs().max()) <= bound
    assert float(values.abs().max()) > 0.999 * bound
    assert float(values.std()) == pytest.approx(bound / math.sqrt(3), rel=0.01)
    assert float(values.mean()) == pytest.approx(0.0, abs=0.01 * bound)


@pytest.mark.parametrize("third", [pytest.param(0, id="q"), pytest.param(1, id="k"), pytest.param(2, id="v")])
def test_q_k_and_v_are_three_xavier_matrices(third: int) -> None:
    """The fan of the fused matrix would give sqrt(6/4D), too small by a factor of sqrt(2)."""
    fused = tensor("blocks.3.attention.qkv.weight", 3 * D, D)
    assert_uniform(fused[third * D : (third + 1) * D], math.sqrt(6 / (2 * D)))


@pytest.mark.parametrize("half", [pytest.param(0, id="k"), pytest.param(1, id="v")])
def test_k_and_v_of_attention_pooling_are_two_xavier_matrices(half: int) -> None:
    fused = tensor("pool.key_value.weight", 2 * D, D)
    assert_uniform(fused[half * D : (half + 1) * D], math.sqrt(6 / (2 * D)))


def test_the_probe_is_xavier_uniform_as_flax_takes_a_vector() -> None:
    """Its shape is (1, 1, D): a fan in of 1 and a fan out of D."""
    probe = tensor("pool.probe", 1, 1, 4000)
    assert probe.shape == (1, 1, 4000)
    assert float(probe.abs().max()) == pytest.approx(math.sqrt(6 / 4001), rel=0.01)
    assert float(probe.std()) == pytest.approx(math.sqrt(2 / 4001), rel=0.03)


def test_q_k_and_v_are_independent() -> None:
    parts = tensor("blocks.0.attention.qkv.weight", 3 * D, D).view(3, D * D)
    assert float((torch.corrcoef(parts) - torch.eye(3)).abs().max()) < 0.02


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("blocks.0.attention.out.weight", (D, D)),
        ("pool.query.weight", (D, D)),
        ("pool.out.weight", (D, D)),
        ("pool.mlp.dense1.weight", (M, D)),
        ("blocks.11.mlp.dense1.weight", (M, D)),
        ("blocks.11.mlp.dense2.weight", (D, M)),
    ],
)
def test_other_matrices_of_a_block_are_xavier_uniform(name: str, shape: tuple[int, int]) -> None:
    assert_uniform(tensor(name, *shape), math.sqrt(6 / (shape[0] + shape[1])))


@pytest.mark.parametrize(
    ("name", "fan_in"),
    [
        pytest.param("embed.patch.weight", 16 * 16 * 3, id="patches"),
        pytest.param("representation.weight", D, id="tanh"),
        pytest.param("embed.resnet.conv_root.weight", 3 * 7 * 7, id="a hybrid's root"),
        pytest.param("embed.resnet.stages.0.1.conv2.weight", 64 * 3 * 3, id="a hybrid's convolution"),
        pytest.param("embed.resnet.stages.1.0.conv_proj.weight", 256, id="a hybrid's projection"),
        pytest.param("conv_root.weight", 3 * 7 * 7, id="BiT's root"),
        pytest.param("stages.2.3.conv3.weight", 256, id="BiT's convolution"),
    ],
)
def test_lecun_normal(name: str, fan_in: int) -> None:
    """As in flax: variance 1 / fan_in after truncation at two standard deviations of the wider normal."""
    kernel = {3 * 7 * 7: 7, 64 * 3 * 3: 3}.get(fan_in, 1)
    shape = (fan_in // kernel**2, kernel, kernel) if "conv" in name else (fan_in,)
    values = tensor(name, M, *shape)
    assert float(values.std()) == pytest.approx(math.sqrt(1 / fan_in), rel=0.01)
    assert float(values.mean()) == pytest.approx(0.0, abs=0.01 * math.sqrt(1 / fan_in))
    bound = 2 * math.sqrt(1 / fan_in) / 0.8796256610342398
    assert 0.99 * bound < float(values.abs().max()) <= bound * (1 + 1e-6)


@pytest.mark.parametrize("name", ["blocks.0.mlp.dense1.bias", "blocks.0.mlp.dense2.bias"])
def test_mlp_biases_are_tiny_normal(name: str) -> None:
    values = tensor(name, 20_000)
    assert float(values.std()) == pytest.approx(1e-6, rel=0.02)
    assert float(values.abs().max()) > 3e-6  # not truncated


@pytest.mark.parametrize("std", [0.02, 0.3])
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        pytest.param("embed.position", (1, 197, D), id="1-D"),
        pytest.param("embed.position_x", (14, 16 * D), id="2-D, columns"),
        pytest.param("embed.position_y", (14, 16 * D), id="2-D, rows"),
    ],
)
def test_position_embeddings_are_normal(name: str, shape: tuple[int, ...], std: float) -> None:
    values = initial_tensor(name, shape, seed=0, position_std=std)
    assert float(values.std()) == pytest.approx(std, rel=0.01)
    assert float(values.mean()) == pytest.approx(0.0, abs=0.01 * std)
    assert float(values.abs().max()) > 3.5 * std


@pytest.mark.parametrize(
    ("name", "shape", "value"),
    [
        pytest.param("head.weight", (1000, D), 0.0, id="a zero head"),
        pytest.param("head.bias", (1000,), 0.0, id="the head's constant is outside its bias"),
        pytest.param("embed.class_token", (1, 1, D), 0.0, id="class token"),
        pytest.param("embed.patch.bias", (D,), 0.0, id="patch bias"),
        pytest.param("representation.bias", (D,), 0.0, id="representation bias"),
        pytest.param("blocks.0.attention.qkv.bias", (3 * D,), 0.0, id="q, k, v biases"),
        pytest.param("blocks.0.attention.out.bias", (D,), 0.0, id="out bias"),
        pytest.param("blocks.0.norm1.weight", (D,), 1.0, id="norm scale"),
        pytest.param("blocks.0.norm2.bias", (D,), 0.0, id="norm bias"),
        pytest.param("norm.weight", (D,), 1.0, id="last norm's scale"),
        pytest.param("blocks.0.attention.q_norm.weight", (D,), 1.0, id="scale of the queries' norm"),
        pytest.param("blocks.0.attention.k_norm.bias", (D,), 0.0, id="bias of the keys' norm"),
        pytest.param("norm.bias", (D,), 0.0, id="last norm's bias"),
        pytest.param("embed.resnet.norm_root.weight", (64,), 1.0, id="a hybrid's root norm"),
        pytest.param("embed.resnet.stages.0.0.norm2.weight", (64,), 1.0, id="a hybrid's inner norm"),
        pytest.param("embed.resnet.stages.0.0.norm_proj.weight", (256,), 1.0, id="a hybrid's projected norm"),
        pytest.param("embed.resnet.stages.0.0.norm_out.weight", (256,), 0.0, id="gn3: a unit begins as the identity"),
        pytest.param("embed.resnet.stages.0.0.norm_out.bias", (256,), 0.0, id="gn3's bias"),
        pytest.param("stages.3.2.norm3.weight", (512,), 1.0, id="BiT's last norm of a unit is none of these"),
    ],
)
def test_constants(name: str, shape: tuple[int, ...], value: float) -> None:
    assert torch.equal(tensor(name, *shape), torch.full(shape, value))


def test_layer_scale_starts_at_the_value_that_the_model_names() -> None:
    state = build_model(ModelConfig(**TINY, layer_scale=1e-4)).state_dict()
    for name in ("blocks.0.scale1.gamma", "blocks.1.scale2.gamma"):
        assert torch.equal(state[name], torch.full((TINY["width"],), 1e-4))


def test_registers_differ_by_a_little() -> None:
    """Equal ones, as zeros would be, have equal gradients: they would stay equal."""
    registers = build_model(ModelConfig(**TINY, registers=4)).state_dict()["embed.registers"]
    assert float(registers.std()) == pytest.approx(1e-6, rel=0.2)


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_of_every_model_has_a_rule(name: str) -> None:
    every: dict[str, Any] = {"num_classes": 3, "representation": not name.startswith("bit")}
    for parameter, shape in shapes_of(ModelConfig(name=name, **every)).items():
        assert tensor(parameter, *(6 for _ in shape)).isfinite().all(), parameter


def test_tensors_of_other_names_and_seeds_are_independent() -> None:
    shape = (3 * D, D)
    values = [
        tensor(f"blocks.{number}.attention.qkv.weight", *shape, seed=seed).flatten()
        for number in (0, 1, 10)
        for seed in (0, 1)
    ]
    assert float((torch.corrcoef(torch.stack(values)) - torch.eye(6)).abs().max()) < 0.02


def test_the_same_name_and_seed_give_the_same_bits_whatever_was_drawn_before() -> None:
    first = tensor("blocks.0.mlp.dense1.weight", M, D, seed=9)
    torch.rand(17)
    assert torch.equal(first, tensor("blocks.0.mlp.dense1.weight", M, D, seed=9))


def test_making_them_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    tensor("embed.position", 1, 5, D)
    assert torch.equal(torch.rand(4), expected)


@pytest.mark.parametrize("name", ["blocks.0.attention.rotary.weight", "scale"])
def test_a_name_without_a_rule_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        tensor(name, 4, 4)
