"""Models are built by name, with the initial weights of the paper's JAX code, and run compiled or recomputed."""

import math
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from pipeline.models import BiT, Model, ModelConfig, ViT, build_model, checkpoint_blocks, compile_blocks, shapes_of
from pipeline.models.bias_sums import FuseBiasSums
from pipeline.models.build import blocks_of, compile_fault, initial_tensor, unfilled_model
from pipeline.models.config import NAMES
from tests.pipeline.models.test_vit import TINY

CHECKOUT = Path(__file__).resolve().parents[3]
SMALL: dict[str, Any] = {"image_size": 32, "num_classes": 5}
TRANSFORMER = SMALL | {"depth": 2, "width": 24, "mlp_width": 40, "num_heads": 3}
VIT = ModelConfig(name="vit_b16", **TRANSFORMER)
HYBRID = ModelConfig(name="r50_vit_b16", **TRANSFORMER, patch=2, resnet_units=(1, 2))
ALL_OPTIONS: dict[str, Any] = {"layer_scale": 0.1, "registers": 2, "qk_norm": True, "position": "rope2d"}
ALL_OPTIONS |= {"patch_norm": True}
MODERN = ModelConfig(name="vit_b16", **TRANSFORMER, **ALL_OPTIONS, pooling="attention")
BIT = ModelConfig(name="bit_r50x1", **SMALL, resnet_units=(1, 2))
BASIC = ModelConfig(name="bit_r18x1", **SMALL, resnet_units=(1, 2))
AXIAL = ModelConfig(name="vit_b16", **TRANSFORMER, patch=8, attention="axial", pooling="average")
needs_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="torch.compile needs a C++ compiler (Debian: g++)"
)
ALL = [
    pytest.param(VIT, id="ViT"),
    pytest.param(HYBRID, id="hybrid"),
    pytest.param(BIT, id="BiT"),
    pytest.param(BASIC, id="BiT of basic units"),
    pytest.param(AXIAL, id="axial"),
]
D, M = 256, 1024  # width and MLP width


def with_random_head(config: ModelConfig) -> Model:
    """In training mode. (A zero head gives no gradients to the rest.)"""
    model = build_model(config)
    with torch.no_grad():
        model.head.weight.normal_(generator=torch.Generator().manual_seed(0))
    return model.train()


def images() -> torch.Tensor:
    return torch.randint(0, 256, (2, 32, 32, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def loss_and_gradients(model: Model) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    torch.manual_seed(0)  # dropout
    loss = F.cross_entropy(model(images()), torch.tensor([1, 3]))
    torch.autograd.backward(loss)
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("config", "kind"), [(VIT, ViT), (HYBRID, ViT), (BIT, BiT)])
def test_a_name_builds_its_model(config: ModelConfig, kind: type) -> None:
    assert type(unfilled_model(config)) is kind
    assert type(build_model(config)) is kind
    assert not list(build_model(config).buffers()), "filling a model from meta would leave them without values"


@pytest.mark.parametrize("config", ALL)
def test_the_initial_weights_are_those_of_seed_and_name(config: ModelConfig) -> None:
    model = build_model(config, seed=5)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, initial_tensor(name, tuple(parameter.shape), seed=5)), name


@pytest.mark.parametrize("config", ALL)
def test_shapes_are_known_without_building(config: ModelConfig) -> None:
    assert shapes_of(config) == {name: tuple(p.shape) for name, p in build_model(config).named_parameters()}


@pytest.mark.parametrize(("config", "num_blocks"), [(VIT, 2), (HYBRID, 2 + 3), (BIT, 3), (BASIC, 3), (AXIAL, 4)])
def test_blocks_are_layers_and_bottlenecks(config: ModelConfig, num_blocks: int) -> None:
    assert len(list(blocks_of(unfilled_model(config)))) == num_blocks


@pytest.mark.parametrize(
    "config",
    [
        *ALL,
        pytest.param(ModelConfig(name="vit_b16", **TRANSFORMER, dropout=0.3), id="dropout"),
        pytest.param(MODERN, id="LayerScale, registers, norms of q and k, rotary positions, attention pooling"),
    ],
)
def test_checkpointing_changes_no_bit_of_loss_and_gradients(config: ModelConfig) -> None:
    plain, recomputed = with_random_head(config), with_random_head(config)
    checkpoint_blocks(recomputed)
    forwards = {"plain": 0, "recomputed": 0}
    for key, model in (("plain", plain), ("recomputed", recomputed)):
        for block in blocks_of(model):
            block.register_forward_pre_hook(lambda *_, key=key: forwards.__setitem__(key, forwards[key] + 1))
    expected, found = loss_and_gradients(plain), loss_and_gradients(recomputed)
    assert torch.equal(found[0], expected[0])
    assert found[1].keys() == expected[1].keys() == set(shapes_of(config))
    for name, gradient in expected[1].items():
        assert torch.equal(found[1][name], gradient), name
    assert forwards["recomputed"] == 2 * forwards["plain"] > 0, "every block ran once more on the way back"


def bytes_kept(depth: int, *, recomputed: bool) -> int:
    """The bytes that autograd keeps between forward and backward besides the parameters, each storage once."""
    model = build_model(replace(VIT, depth=depth))
    if recomputed:
        checkpoint_blocks(model)
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.Tensor] = {}  # keeps them alive, so that no address is reused

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logits = model(images())
    assert logits.requires_grad
    return sum(t.untyped_storage().nbytes() for pointer, t in kept.items() if pointer not in parameters)


def test_checkpointing_keeps_the_input_of_each_block_and_no_more() -> None:
    input_bytes = 2 * (1 + 4) * 24 * 4  # B images of N tokens of D float32
    kept = {recomputed: [bytes_kept(depth, recomputed=recomputed) for depth in (2, 3)] for recomputed in (False, True)}
    assert kept[True][1] - kept[True][0] == input_bytes
    assert kept[False][1] - kept[False][0] > 8 * input_bytes


def test_nothing_is_recomputed_where_no_gradient_is_wanted() -> None:
    model = build_model(VIT)
    checkpoint_blocks(model)
    with torch.no_grad():
        assert torch.equal(model(images()), build_model(VIT)(images()))


@pytest.mark.parametrize(
    ("config", "backend", "recomputed"),
    [
        pytest.param(VIT, "aot_eager", False, id="traced"),
        pytest.param(VIT, "aot_eager", True, id="traced, recomputed"),
        pytest.param(MODERN, "aot_eager", True, id="all options, traced, recomputed"),
        pytest.param(BASIC, "aot_eager", True, id="basic units, traced, recomputed"),
        pytest.param(AXIAL, "aot_eager", True, id="axial, traced, recomputed"),
        pytest.param(VIT, "inductor", False, id="compiled", marks=[pytest.mark.long, needs_compiler]),
        pytest.param(MODERN, "inductor", False, id="all options, compiled", marks=[pytest.mark.long, needs_compiler]),
        pytest.param(BASIC, "inductor", False, id="basic units, compiled", marks=[pytest.mark.long, needs_compiler]),
        pytest.param(AXIAL, "inductor", False, id="axial, compiled", marks=[pytest.mark.long, needs_compiler]),
    ],
)
def test_compiling_keeps_names_and_results(config: ModelConfig, backend: str, recomputed: bool) -> None:
    plain, compiled = with_random_head(config), with_random_head(config)
    compile_blocks(compiled, backend=backend)
    if recomputed:
        checkpoint_blocks(compiled)
    assert [name for name, _ in compiled.named_parameters()] == list(shapes_of(config))
    expected, found = loss_and_gradients(plain), loss_and_gradients(compiled)
    torch.testing.assert_close(found[0], expected[0])
    for name, gradient in expected[1].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-4, atol=1e-5, msg=name)


def test_every_kind_of_block_is_compiled_for_training_and_for_evaluation() -> None:
    """A BiT has eight kinds of units and one forward function: torch's default limit of eight would leave the rest
    uncompiled."""
    model = build_model(replace(BIT, resnet_units=(2, 2, 2, 2)))
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    with torch._dynamo.config.patch(recompile_limit=8, fail_on_recompile_limit_hit=True):
        compile_blocks(model, backend="eager")
        for _ in range(2):
            model.train()(images())
            with torch.no_grad():
                model.eval()(images().repeat(2, 1, 1, 1))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2 * 8


def test_what_is_asked_of_the_compiler_reaches_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA graphs are for GPUs: here nothing more can be seen of them."""
    asked: list[object] = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda _, **options: asked.append(options["options"]))
    model = with_random_head(VIT)
    compile_blocks(model)
    compile_blocks(model, cuda_graphs=True)
    compile_blocks(model, deterministic=True, rounds_as_eager=True)
    compile_blocks(model, tuned=True)
    compile_blocks(model, on_gpu=True)
    compile_blocks(model, on_gpu=True, tuned=True)
    compile_blocks(model, on_gpu=True, tuned=True, deterministic=True)
    *others, on_gpu, tuned, in_order = asked[:: len(asked) // 7]
    assert others == [
        None,
        {"triton.cudagraphs": True},
        {"deterministic": True, "emulate_precision_casts": True},
        None,
    ]
    assert asked[1] is None
    assert isinstance(on_gpu, dict)
    assert [type(keep).__name__ for keep in on_gpu.values()] == ["KeepResiduals"]
    assert isinstance(tuned, dict)
    assert isinstance(in_order, dict)
    assert tuned == on_gpu | {"post_grad_custom_pre_pass": FuseBiasSums(), "coordinate_descent_tuning": True}
    assert in_order == tuned | {"deterministic": True, "coordinate_descent_tuning": False}
    torch.compile(model, options=in_order)  # which refuses an unknown name or type
    assert "triton.cudagraphs" in torch._inductor.list_options()


@needs_compiler
def test_a_fault_of_the_compiler_is_told_in_a_line() -> None:
    cpu = torch.device("cpu")
    assert compile_fault(cpu) == ""
    torch.compiler.reset()
    with torch._inductor.config.patch({"cpp.cxx": (None, "no-such-compiler")}):
        torch._inductor.cpp_builder.cpp_compiler_search.cache_clear()
        assert compile_fault(cpu).startswith("InvalidCxxCompiler: No working C++ compiler found")
    torch._inductor.cpp_builder.cpp_compiler_search.cache_clear()


@pytest.mark.long
@needs_compiler
def test_a_second_process_takes_its_kernels_from_the_cache(tmp_path: Path) -> None:
    """A restart after a fault compiles nothing again, and computes the same bits."""
    program = (
        "import sys, torch\nfrom tests.pipeline.models.test_build import *\n"
        "model = with_random_head(VIT)\ncompile_blocks(model)\nloss, gradients = loss_and_gradients(model)\n"
        "from torch._dynamo.utils import counters\n"
        "found = counters['aot_autograd']\n"
        "digest = hash(tuple(float(value.double().sum()) for value in (loss, *gradients.values())))\n"
        "print(found['autograd_cache_hit'], found['autograd_cache_miss'], digest)"
    )
    environ = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(CHECKOUT)}
    runs = [
        subprocess.run([sys.executable, "-P", "-c", program], env=environ, capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    (hits, misses, bits), (hits_again, misses_again, bits_again) = (run.stdout.split() for run in runs)
    assert (int(hits), int(misses_again), bits_again) == (0, 0, bits)
    assert hits_again == misses != "0"


@pytest.mark.long
@pytest.mark.parametrize("on_gpu", [False, True])
@needs_compiler
def test_a_second_process_runs_the_kernel_of_attention_that_it_has_chosen(tmp_path: Path, *, on_gpu: bool) -> None:
    """Not that of the process that filled the cache; with the same kernel, nothing is compiled again. In the gate,
    test_attention.py looks at the key."""
    program = (
        "import sys, torch\nfrom tests.pipeline.models.test_build import *\n"
        "from pipeline.models.attention import kernel_that_ran, kernels_seen, use_kernel\n"
        "from torch._dynamo.utils import counters\n"
        "use_kernel(sys.argv[1])\n"
        f"model = with_random_head(VIT)\ncompile_blocks(model, on_gpu={on_gpu})\nloss_and_gradients(model)\n"
        "with kernels_seen() as calls: loss_and_gradients(model)\n"
        "print(kernel_that_ran(calls, num_layers=2), counters['aot_autograd']['autograd_cache_hit'] > 0)"
    )
    environ = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(CHECKOUT)}
    found = []
    for name in ("flash", "math", "flash", "math"):
        words = [sys.executable, "-P", "-c", program, name]
        run = subprocess.run(words, env=environ, capture_output=True, text=True, check=True)
        found.append(run.stdout.split())
    assert found == [["flash", "False"], ["math", "False"], ["flash", "True"], ["math", "True"]]


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
        pytest.param("head.weight", (100, 2 * D), id="a head"),
    ],
)
def test_position_embeddings_and_a_head_are_normal(name: str, shape: tuple[int, ...], std: float) -> None:
    values = initial_tensor(name, shape, seed=0, position_std=std, head_std=std)
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


@pytest.mark.parametrize("name", ["vit_ti16", "bit_r18x1", "r_vit_ti16"])
def test_an_unfilled_model_draws_no_values(name: str) -> None:
    """Drawing values for ViT-H/14 that nobody uses takes seconds."""
    before = torch.get_rng_state()
    model = unfilled_model(ModelConfig(name=name, num_classes=10))
    assert torch.equal(torch.get_rng_state(), before)
    expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert shapes_of(model.config) == expected
