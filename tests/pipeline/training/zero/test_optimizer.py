"""What decays, in which group, at which rate of its layer (as timm's), and what one step does."""

from dataclasses import replace
from types import ModuleType
from typing import Any, Literal

import pytest
import torch
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.models import ModelConfig, build_model
from pipeline.models.build import Model, shapes_of
from pipeline.training.settings.job import OptimizerConfig, scaled_by_rate
from pipeline.training.settings.schedule import ScheduleConfig, learning_rate
from pipeline.training.zero.optimizer import (
    RATE_FACTOR,
    build_optimizer,
    decay_of,
    freeze,
    is_decayed,
    is_trained,
    rate_factors,
    update_averages,
)
from shards.errors import UserError
from tests.pipeline.models.names_elsewhere import bit_as_timm, vit_as_timm
from tests.pipeline.models.parity import imported

MODEL = ModelConfig(
    name="vit", image_size=8, patch=4, depth=1, width=8, mlp_width=12, num_heads=2, num_classes=3, representation=True
)
KERNELS = {
    "embed.patch.weight",
    "blocks.0.attention.qkv.weight",
    "blocks.0.attention.out.weight",
    "blocks.0.mlp.dense1.weight",
    "blocks.0.mlp.dense2.weight",
    "representation.weight",
    "head.weight",
}
VIT = ModelConfig(name="vit", image_size=32, patch=8, depth=3, width=16, mlp_width=24, num_heads=2, num_classes=5)
BIT = ModelConfig(name="bit_r50x1", image_size=32, num_classes=5, resnet_units=(2, 3))
HYBRID = ModelConfig(name="r50_vit_b16", num_classes=5, resnet_units=(1, 2), depth=2, image_size=32)


@pytest.mark.parametrize(
    ("decay", "expected"),
    [
        pytest.param("kernels", KERNELS, id="big_vision's mask: no bias, norm, class token or position"),
        pytest.param("all", {name for name, _ in build_model(MODEL).named_parameters()}, id="every parameter"),
    ],
)
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_groups(decay: Any, expected: set[str], name: Any) -> None:
    model = build_model(MODEL)
    config = OptimizerConfig(name=name, weight_decay=0.1, decay=decay)
    optimizer = build_optimizer(model.named_parameters(), config)
    names = {parameter: name for name, parameter in model.named_parameters()}
    by_decay = {group["weight_decay"]: {names[p] for p in group["params"]} for group in optimizer.param_groups}
    assert by_decay[0.1] == expected
    assert by_decay.get(0.0, set()) == set(names.values()) - expected
    assert {group["lr"] for group in optimizer.param_groups} == {0.0}, "the loop sets the rate at each step"


@pytest.mark.parametrize(
    ("name", "decayed"),
    [
        ("head.weight", True),
        ("head.bias", False),
        ("norm.weight", False),
        ("blocks.7.norm1.weight", False),
        ("blocks.7.norm2.bias", False),
        ("embed.class_token", False),
        ("embed.position", False),
        ("embed.registers", False),
        ("embed.distillation_token", False),
        ("head_dist.weight", True),
        ("pool.probe", False),
        ("pool.key_value.weight", True),
        ("pool.norm.weight", False),
        ("blocks.7.attention.q_norm.weight", False),
        ("blocks.7.scale1.gamma", False),
    ],
)
def test_the_mask_by_name(name: str, decayed: bool) -> None:
    assert is_decayed(name, OptimizerConfig()) == decayed
    assert is_decayed(name, OptimizerConfig(decay="all"))


@pytest.mark.parametrize(
    ("model", "kernels", "others"),
    [
        pytest.param(
            ModelConfig(name="r50_vit_b16", num_classes=3, resnet_units=(1, 1)),
            ("embed.patch.weight", "head.weight"),
            ("embed.position", "embed.class_token", "head.bias"),
            id="hybrid",
        ),
        pytest.param(ModelConfig(name="bit_r50x1", num_classes=3, resnet_units=(1, 1)), ("head.weight",), (), id="BiT"),
    ],
)
def test_the_mask_in_convolutional_models(
    model: ModelConfig, kernels: tuple[str, ...], others: tuple[str, ...]
) -> None:
    """Exactly the tensors of two or more dimensions that are no table decay: flax's kernels."""
    tables = {"embed.position", "embed.class_token"}
    shapes = {name: parameter.dim() for name, parameter in build_model(model).named_parameters()}
    expected = {name for name, dim in shapes.items() if dim >= 2 and name not in tables}
    assert {name for name in shapes if is_decayed(name, OptimizerConfig())} == expected
    assert expected.issuperset(kernels)
    assert expected.isdisjoint(others)
    assert any("conv" in name for name in expected)


@pytest.mark.parametrize(
    ("config", "name", "expected"),
    [
        pytest.param(OptimizerConfig(weight_decay=0.03), "head.weight", 0.03, id="the head as every matrix"),
        pytest.param(
            OptimizerConfig(weight_decay=0.03, head_decay=100), "head.weight", 3.0, id="ViT-G: the head x 100"
        ),
        pytest.param(
            OptimizerConfig(weight_decay=0.03, head_decay=100), "head_dist.weight", 3.0, id="the distillation token's"
        ),
        pytest.param(OptimizerConfig(weight_decay=0.03, head_decay=100), "head.bias", 0.0, id="its bias is masked"),
        pytest.param(OptimizerConfig(weight_decay=0.03, head_decay=0), "head.weight", 0.0, id="the head left alone"),
        pytest.param(
            OptimizerConfig(weight_decay=0.03, head_decay=100), "representation.weight", 0.03, id="the hidden layer"
        ),
        pytest.param(OptimizerConfig(weight_decay=0.03, decay="all"), "norm.bias", 0.03, id="all"),
    ],
)
def test_decay_of_one_tensor(config: OptimizerConfig, name: str, expected: float) -> None:
    assert decay_of(name, config) == pytest.approx(expected)


def test_the_head_has_a_group_of_its_own() -> None:
    model = build_model(MODEL)
    optimizer = build_optimizer(model.named_parameters(), OptimizerConfig(weight_decay=0.1, head_decay=10))
    by_decay = {group["weight_decay"]: len(group["params"]) for group in optimizer.param_groups}
    assert by_decay == {1.0: 1, 0.1: len(KERNELS) - 1, 0.0: len(list(model.parameters())) - len(KERNELS)}


def one_step(config: OptimizerConfig, *, rate: float, gradient: float) -> torch.Tensor:
    """The weight 2.0 after one step."""
    weight = torch.nn.Parameter(torch.full((1, 1), 2.0))
    optimizer = build_optimizer([("head.weight", weight)], config)
    weight.grad = torch.full((1, 1), gradient)
    optimizer.param_groups[0]["lr"] = rate
    optimizer.step()
    return weight.detach()


def test_adams_decay_is_decoupled_and_scaled_by_the_rate() -> None:
    config = OptimizerConfig(weight_decay=0.1)
    expected = 2.0 - 0.01 * (1.0 + 0.1 * 2.0)  # Adam's first step is the rate, whatever the gradient
    assert float(one_step(config, rate=0.01, gradient=7.0)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("peak", [1e-3, 1e-2])
def test_the_decay_that_follows_the_schedule_is_big_visions(peak: float) -> None:
    """Against the update written out, w -= lr(t) u + s(t) decay w, with s(t) = lr(t) / peak and u Adam's direction,
    over a whole schedule. At another peak the decay stays what it was."""
    schedule = ScheduleConfig(learning_rate=peak, decay="cosine", warmup_steps=3)
    config = OptimizerConfig(weight_decay=1e-2, decay_scale="schedule")
    weight = torch.nn.Parameter(torch.full((1, 1), 2.0))
    optimizer = build_optimizer([("head.weight", weight)], scaled_by_rate(config, peak_rate=peak))
    expected, first, second = 2.0, 0.0, 0.0
    for step in range(12):
        rate, gradient = learning_rate(step, config=schedule, num_steps=12), 0.5 + step
        weight.grad = torch.full((1, 1), gradient)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        first, second = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient**2
        direction = first / (1 - 0.9 ** (step + 1)) / ((second / (1 - 0.999 ** (step + 1))) ** 0.5 + 1e-8)
        expected -= rate * direction + rate / peak * 1e-2 * expected
        assert float(weight.detach()) == pytest.approx(expected, rel=1e-5)


def test_big_visions_decay_in_torchs_terms() -> None:
    """Its ImageNet-21k recipe: 1e-4 at a peak of 1e-3 is 0.1 here; 0.03 of the rate stays 0.03."""
    config = OptimizerConfig(weight_decay=1e-4, decay_scale="schedule", head_decay=100)
    assert scaled_by_rate(config, peak_rate=1e-3) == replace(config, decay_scale="rate", weight_decay=1e-4 / 1e-3)
    assert scaled_by_rate(OptimizerConfig(weight_decay=0.03), peak_rate=1e-3).weight_decay == 0.03


def test_a_decay_that_follows_no_schedule_is_refused() -> None:
    with pytest.raises(UserError, match=r"schedule\.learning_rate is 0\.0 .* give a rate above 0"):
        scaled_by_rate(OptimizerConfig(decay_scale="schedule"), peak_rate=0.0)
    with pytest.raises(UserError, match=r"decay_scale is 'schedule' with optimizer\.name 'sgd'"):
        OptimizerConfig(name="sgd", decay_scale="schedule")
    with pytest.raises(ValueError, match="call scaled_by_rate first"):
        build_optimizer([], OptimizerConfig(decay_scale="schedule"))


def test_a_first_moment_in_bf16_is_big_visions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against optax's scale_by_adam(mu_dtype="bfloat16") written out in float64: the update takes the moment before it
    is rounded. In pieces that do not divide the tensor."""
    monkeypatch.setattr("pipeline.training.zero.optimizer._PIECE", 8)
    generator = torch.Generator().manual_seed(1)
    weight = torch.nn.Parameter(torch.randn(7, 5, generator=generator))
    optimizer = build_optimizer([("head.weight", weight)], OptimizerConfig(weight_decay=0.1, first_moment="bf16"))
    optimizer.param_groups[0]["lr"] = 0.01
    expected = weight.detach().double()
    first, second = torch.zeros_like(expected), torch.zeros_like(expected)
    for update in range(1, 21):
        weight.grad = torch.randn(7, 5, generator=generator)
        gradient = weight.grad.double()
        optimizer.step()
        first, second = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient**2
        direction = first / (1 - 0.9**update) / ((second / (1 - 0.999**update)).sqrt() + 1e-8)
        expected = expected - 0.01 * (direction + 0.1 * expected)
        kept = optimizer.state[weight]["exp_avg"]
        assert kept.dtype == torch.bfloat16
        torch.testing.assert_close(kept.double(), first, rtol=2**-8, atol=1e-7)  # half the last bit
        first = kept.double()
    torch.testing.assert_close(weight.detach().double(), expected, atol=2e-6, rtol=0)


def test_the_average_is_a_geometric_sum() -> None:
    """Of weights w1 .. wn from w0: f^n w0 + (1 - f) sum of f^(n - k) wk."""
    weights = [torch.randn(5, generator=torch.Generator().manual_seed(k)) for k in range(8)]
    average = weights[0].clone()
    for current in weights[1:]:
        update_averages([average], [current], decay=0.9)
    shares = [0.9**7, *(0.1 * 0.9 ** (7 - k) for k in range(1, 8))]
    assert sum(shares) == pytest.approx(1.0)
    expected = sum(share * one for share, one in zip(shares, weights, strict=True))
    torch.testing.assert_close(average, expected)


def test_the_average_stays_that_of_float64() -> None:
    """At the paper's decay to 1e-6 after 500 steps; after 20,000, rounding to float32 has added up to 3e-6."""
    generator = torch.Generator().manual_seed(5)
    weights = torch.randn(257, generator=generator)
    average, exact = weights.clone(), weights.double()
    for step in range(20_000):
        weights += 0.01 * torch.randn(257, generator=generator)
        update_averages([average], [weights], decay=0.9999)
        exact = 0.9999 * exact + 0.0001 * weights.double()
        if step + 1 in (500, 20_000):
            difference = float((average - exact).abs().max() / exact.abs().max())
            assert difference < (1e-6 if step < 500 else 5e-6)


@pytest.mark.parametrize("decay", [0.3, 0.9, 0.9999])
def test_averages_have_the_bits_of_a_lerp_for_each(decay: float) -> None:
    generator = torch.Generator().manual_seed(1)
    averages, weights = ([torch.randn(size, generator=generator) for size in (1, 7, 4099)] for _ in range(2))
    expected = [average.clone().lerp_(own, 1.0 - decay) for average, own in zip(averages, weights, strict=True)]
    update_averages(averages, weights, decay=decay)
    assert all(map(torch.equal, averages, expected))


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Remembers which operators ran."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("name", "kernel"), [("adamw", "aten::_fused_adamw_"), ("sgd", "aten::_fused_sgd_")], ids=["adamw", "sgd"]
)
def test_an_update_is_one_fused_kernel_per_group(name: Literal["adamw", "sgd"], kernel: str) -> None:
    """On CPUs and GPUs alike: none of the loops over tensors that PyTorch takes by default."""
    weights = {"dense1.weight": torch.nn.Parameter(torch.ones(3, 2)), "dense1.bias": torch.nn.Parameter(torch.ones(3))}
    optimizer = build_optimizer(weights.items(), OptimizerConfig(name=name, weight_decay=0.1))
    for weight in weights.values():
        weight.grad = torch.ones_like(weight)
    with _Operators() as operators:
        optimizer.step()
    assert [found for found in operators.names if "fused" in found] == [kernel, kernel]
    assert not [found for found in operators.names if "mul" in found or "sqrt" in found], "a loop over tensors"
    assert {"cpu", "cuda"} <= set(_get_fused_kernels_supported_devices())


def test_sgd_is_momentum_without_decay() -> None:
    config = OptimizerConfig(name="sgd", momentum=0.9)
    weight = torch.nn.Parameter(torch.full((1, 1), 2.0))
    optimizer = build_optimizer([("head.weight", weight)], config)
    optimizer.param_groups[0]["lr"] = 0.1
    for gradient in (1.0, 1.0):
        weight.grad = torch.full((1, 1), gradient)
        optimizer.step()
    assert float(weight.detach()) == pytest.approx(2.0 - 0.1 * 1.0 - 0.1 * 1.9)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_a_step_has_the_bits_of_torchs_own(name: Any) -> None:
    """Ours leaves out the wrapper that loads torch._dynamo, and nothing else."""
    config = OptimizerConfig(name=name, weight_decay=0.1)
    ours, theirs = build_model(MODEL), build_model(MODEL)
    optimizer = build_optimizer(ours.named_parameters(), config)
    plain = build_optimizer(theirs.named_parameters(), config)
    for step in range(3):
        for model in (ours, theirs):
            generator = torch.Generator().manual_seed(step)
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator)
        for each in (optimizer, plain):
            for group in each.param_groups:
                group["lr"] = 0.1
        optimizer.step()
        type(plain).__base__.step(plain)  # type: ignore[union-attr]
    assert all(torch.equal(*pair) for pair in zip(ours.parameters(), theirs.parameters(), strict=True))
    assert not any(parameter.grad_fn for parameter in ours.parameters())


@pytest.fixture(scope="module")
def optim() -> ModuleType:
    return imported("timm.optim")


def numbered(config: ModelConfig) -> tuple[Model, list[str]]:
    """A model whose tensors hold their own numbers, and their names by number."""
    model = build_model(config)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.fill_(number)
    return model, [name for name, _ in model.named_parameters()]


@pytest.mark.parametrize("config", [VIT, BIT], ids=["vit", "bit"])
def test_rates_are_those_of_timm(optim: ModuleType, config: ModelConfig) -> None:
    """Every parameter's, against param_groups_layer_decay of timm's own model."""
    models = imported("timm.models")
    model, names = numbered(config)
    if config is VIT:
        theirs = models.VisionTransformer(
            img_size=32, patch_size=8, depth=3, embed_dim=16, num_heads=2, mlp_ratio=1.5, num_classes=5
        )
        state = vit_as_timm(model)
    else:
        theirs = models.resnetv2.ResNetV2(layers=(2, 3), num_classes=5, stem_type="fixed")
        state = bit_as_timm(model)
    names_of = {id(parameter): name for name, parameter in theirs.named_parameters()}
    groups = optim.param_groups_layer_decay(theirs, layer_decay=0.65)
    expected = {names_of[id(each)]: group["lr_scale"] for group in groups for each in group["params"]}
    factors = rate_factors(names, OptimizerConfig(layer_decay=0.65))
    found = {name: factors[names[int(value.flatten()[0])]] for name, value in state.items()}
    assert found == pytest.approx(expected, rel=1e-12)
    assert len(set(found.values())) == (5 if config is VIT else 7)


@pytest.mark.parametrize(
    ("config", "name", "power"),
    [
        (VIT, "embed.position", 4),
        (replace(VIT, registers=2), "embed.registers", 4),
        (VIT, "blocks.0.norm1.bias", 3),
        (VIT, "blocks.2.mlp.dense1.weight", 1),
        (VIT, "norm.weight", 1),
        (replace(VIT, layer_scale=0.1), "blocks.1.scale2.gamma", 2),
        (VIT, "head.bias", 0),
        (replace(VIT, pooling="attention"), "pool.key_value.weight", 0),
        (replace(VIT, pooling="attention"), "norm.weight", 1),
        (HYBRID, "embed.resnet.stages.1.1.conv1.weight", 3),
        (HYBRID, "embed.patch.weight", 3),
        (HYBRID, "blocks.0.attention.qkv.weight", 2),
        (BIT, "conv_root.weight", 6),
        (BIT, "stages.0.0.norm1.weight", 5),
        (BIT, "stages.1.2.conv3.weight", 1),
    ],
)
def test_rates_written_out(config: ModelConfig, name: str, power: int) -> None:
    factors = rate_factors(shapes_of(config), OptimizerConfig(layer_decay=0.5))
    assert factors[name] == 0.5**power
    assert set(rate_factors(shapes_of(config), OptimizerConfig()).values()) == {1.0}


def test_the_hidden_layer_belongs_to_the_head() -> None:
    config = OptimizerConfig(layer_decay=0.5, freeze_backbone=True)
    assert rate_factors(["representation.weight", "blocks.0.norm1.bias", "head.bias"], config) == {
        "representation.weight": 1.0,
        "blocks.0.norm1.bias": 0.5,
        "head.bias": 1.0,
    }
    assert is_trained("representation.weight", config)


def test_a_group_for_each_decay_and_rate() -> None:
    model = build_model(VIT)
    optimizer = build_optimizer(model.named_parameters(), OptimizerConfig(weight_decay=0.1, layer_decay=0.5))
    found = {(group["weight_decay"], group[RATE_FACTOR]): len(group["params"]) for group in optimizer.param_groups}
    blocks: dict[Any, int] = {(0.1, 0.5**power): 4 for power in (1, 2, 3)}
    blocks |= {(0.0, 0.5): 10, (0.0, 0.25): 8, (0.0, 0.125): 8}
    assert found == blocks | {(0.1, 1.0): 1, (0.0, 1.0): 1, (0.1, 0.0625): 1, (0.0, 0.0625): 3}


@pytest.mark.parametrize("config", [VIT, BIT, HYBRID], ids=["vit", "bit", "hybrid"])
def test_a_frozen_backbone_is_all_but_the_head(config: ModelConfig) -> None:
    model, optimizer = build_model(config), OptimizerConfig(freeze_backbone=True)
    freeze(model, optimizer)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {"head.weight", "head.bias"}
    groups = build_optimizer(model.named_parameters(), optimizer).param_groups
    assert sum(len(group["params"]) for group in groups) == 2
    freeze(model, OptimizerConfig())
    assert all(parameter.requires_grad for parameter in model.parameters())
