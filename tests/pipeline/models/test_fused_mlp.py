"""MLPs with fused products, as a CPU emulates QuACK's kernels: how near they are to usual ones, and what is refused. In
the long part, QuACK compiles them."""

import json
import os
import re
import runpy
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from benchmarks import fusion_gpu
from pipeline.models import fused_mlp
from pipeline.models.build import blocks_of, build_model
from pipeline.models.config import Gelu, ModelConfig
from pipeline.models.fused_mlp import fuse_mlps, fused_mlp_fault
from pipeline.models.layers import MLP

CHECKOUT = Path(__file__).resolve().parents[3]
CPU, GPU = torch.device("cpu"), torch.device("cuda")
MODEL = ModelConfig(
    name="vit", image_size=16, num_classes=5, patch=8, depth=2, width=64, mlp_width=256, num_heads=4, position_std=0.3
)
FORMS = pytest.mark.parametrize("is_tanh", [True, False], ids=["tanh", "exact"])
Gradients = dict[str, torch.Tensor]


def values_of(*size: int, seed: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).bfloat16()


def layer() -> tuple[torch.Tensor, ...]:
    """The input of an MLP, its first weight and bias, its second weight, and the gradient of its result. The operators
    are defined."""
    fused_mlp._define_operators()
    inputs, weight1, weight2 = values_of(200, 128, seed=0), values_of(512, 128, seed=1), values_of(128, 512, seed=3)
    return inputs, weight1 / 16, values_of(512, seed=2), weight2 / 32, values_of(200, 128, seed=4)


def ulps(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference in units of the last of bf16's 8 bits: the last bit of the element or, if that is larger,
    of the root mean square of all. Where terms cancel, no kernel is exact beyond that."""
    found, expected = found.double(), expected.double()
    scale = torch.maximum(found.abs(), expected.abs()).clamp_min(float(expected.square().mean().sqrt()))
    return float(((found - expected).abs() / torch.exp2(scale.log2().floor() - 7)).max())


@FORMS
def test_operators_are_within_two_ulps_of_separate_kernels_and_exact_results_rounded_once(is_tanh: bool) -> None:
    x_TD, weight1_MD, bias1_M, weight2_DM, dy_TD = layer()
    form = "tanh" if is_tanh else "none"
    u_TM = F.linear(x_TD, weight1_MD, bias1_M)
    # As in inductor's kernels: results of products are rounded, and the bias's sum is of what is not rounded yet.
    du_TM = torch.ops.aten.gelu_backward((dy_TD @ weight2_DM).float(), u_TM.float(), approximate=form)
    usual = u_TM, F.gelu(u_TM, approximate=form), du_TM.bfloat16(), du_TM.sum(0).bfloat16()
    found_TM, hidden_TM = torch.ops.patchline.mlp_hidden(x_TD, weight1_MD, bias1_M, is_tanh)
    fused = found_TM, hidden_TM, *torch.ops.patchline.mlp_hidden_gradients(dy_TD, weight2_DM, found_TM, is_tanh)
    x_TD, weight1_MD, bias1_M, weight2_DM, dy_TD = (each.double() for each in layer())
    u_TM = F.linear(x_TD, weight1_MD, bias1_M)
    du_TM = torch.ops.aten.gelu_backward(dy_TD @ weight2_DM, found_TM.double(), approximate=form)
    exact = u_TM, F.gelu(u_TM, approximate=form), du_TM, du_TM.sum(0)
    names = ("u", "h", "gradient of u", "gradient of the bias")
    for name, one, other, true in zip(names, fused, usual, exact, strict=True):
        assert one.dtype is other.dtype is torch.bfloat16
        assert ulps(one, other) <= 2, name
        assert ulps(one, true) <= 0.51, name
        # Rounded once: as near to exact results as bf16 can be. On some CPUs the separate product is so, too.
        assert (one - true).norm() <= (1 + 1e-6) * (true.bfloat16() - true).norm(), name


def gradients_of(
    gelu: Gelu, *, is_fused: bool, is_compiled: bool = False, dtype: torch.dtype = torch.bfloat16
) -> Gradients:
    """A block's result for 3 images, and the gradients of its input and parameters."""
    torch.compiler.reset()
    model = build_model(replace(MODEL, gelu=gelu)).to(dtype).train()
    if is_fused:
        fuse_mlps(model)
    block, *_ = blocks_of(model)
    z_BND, towards_BND = (values_of(3, 5, 64, seed=seed).to(dtype) for seed in (5, 6))
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True, dynamic=False) if is_compiled else block
    result_BND = compiled(z_BND.requires_grad_())
    names, tensors = zip(*block.named_parameters(), strict=True)
    found = torch.autograd.grad(result_BND, (z_BND, *tensors), towards_BND)
    return dict(zip(("result", "z", *names), (result_BND.detach(), *found), strict=True))


@pytest.mark.parametrize("gelu", ["tanh", "exact"])
def test_a_block_has_the_same_gradients_and_is_one_graph(gelu: Gelu) -> None:
    usual, fused = gradients_of(gelu, is_fused=False), gradients_of(gelu, is_fused=True)
    for name, expected in usual.items():
        error = (fused[name] - expected).double().norm() / expected.double().norm()
        assert error < 2 * torch.finfo(torch.bfloat16).eps, name
    assert any(not torch.equal(fused[name], expected) for name, expected in usual.items()), "nothing is fused"
    compiled = gradients_of(gelu, is_fused=True, is_compiled=True)
    assert all(torch.equal(compiled[name], expected) for name, expected in fused.items())
    usual, fused = (gradients_of(gelu, is_fused=each, dtype=torch.float32) for each in (False, True))
    for name, expected in usual.items():
        torch.testing.assert_close(fused[name], expected, rtol=1e-5, atol=1e-5)


@FORMS
def test_operators_are_declared_as_they_compute(is_tanh: bool) -> None:
    x_TD, weight1_MD, bias1_M, weight2_DM, dy_TD = layer()
    u_TM, _ = torch.ops.patchline.mlp_hidden(x_TD, weight1_MD, bias1_M, is_tanh)
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(
        torch.ops.patchline.mlp_hidden.default, (x_TD, weight1_MD, bias1_M, is_tanh), test_utils=tests
    )
    torch.library.opcheck(
        torch.ops.patchline.mlp_hidden_gradients.default, (dy_TD, weight2_DM, u_TM, is_tanh), test_utils=tests
    )


def test_only_blocks_are_fused_and_only_where_gradients_are_needed() -> None:
    model = build_model(replace(MODEL, pooling="attention")).bfloat16()
    before = {name: type(module) for name, module in model.named_modules()}
    parameters = list(model.state_dict())
    fuse_mlps(model)
    fused = [name for name, module in model.named_modules() if isinstance(module, MLP) and module.fused]
    assert fused == ["blocks.0.mlp", "blocks.1.mlp"]
    assert {name: type(module) for name, module in model.named_modules()} == before
    assert list(model.state_dict()) == parameters
    block: Any = next(blocks_of(model))
    z_BND = values_of(1, 4, 64, seed=7)
    usual = build_model(replace(MODEL, pooling="attention")).bfloat16().blocks[0].mlp  # type: ignore[union-attr,index]
    with torch.no_grad():
        assert torch.equal(block.mlp(z_BND), usual(z_BND))


def test_what_a_device_lacks_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    capability = [8, 9]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA L4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: tuple(capability))
    assert fused_mlp_fault(CPU) == "QuACK has no kernels for a CPU"
    assert fused_mlp_fault(GPU) == "NVIDIA L4 has compute capability 8.9, and the kernels begin with 9.0"
    capability[:] = [9, 0]
    monkeypatch.setattr(fused_mlp, "find_spec", lambda _: None)
    assert fused_mlp_fault(GPU) == "quack-kernels is not installed (pip install 'patchline[quack]')"
    monkeypatch.setattr(fused_mlp, "find_spec", lambda _: True)
    monkeypatch.setattr(fused_mlp, "version", lambda _: version("no-such-package"))
    assert fused_mlp_fault(GPU).startswith("quack-kernels is not installed ("), "another package has this module"
    monkeypatch.setattr(fused_mlp, "version", lambda _: "0.7.1")
    assert fused_mlp_fault(GPU) == "quack-kernels is 0.7.1, not 0.6.x (pip install 'patchline[quack]')"
    monkeypatch.setattr(fused_mlp, "version", lambda _: "0.6.5")
    assert not fused_mlp_fault(GPU)


def test_importing_defines_no_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take milliseconds of every start; a job that asks for them defines them."""
    monkeypatch.setattr(torch.library, "custom_op", None)
    assert "fuse_mlps" in runpy.run_path(str(fused_mlp.__file__))


@pytest.mark.long
def test_quack_compiles_the_kernels_for_an_h100(tmp_path: Path) -> None:
    """The newest QuACK that was tried, installed outside of the environment as benchmarks/fusion_gpu.py says, is called
    as on a GPU, but launches nothing."""
    folder = tmp_path / "site-packages"
    packages = re.findall(r"[\w-]+==[\w.]+", str(fusion_gpu.__doc__))
    assert f"{fused_mlp._PACKAGE}=={fused_mlp._QUACK}5" in packages
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder, *packages]
    subprocess.run(install, check=True, timeout=500)
    code = "import json; from benchmarks.fusion_gpu import quack_kernels; print(json.dumps(quack_kernels()))"
    paths = CHECKOUT, folder, folder / "nvidia_cutlass_dsl/dsl_packages"
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    ran = subprocess.run(
        [sys.executable, "-c", code], env=environ, check=True, capture_output=True, text=True, timeout=500
    )
    said = json.loads(ran.stdout.splitlines()[-1])
    assert len(said) == 4
    assert max(fusion_gpu.numbers_in(list(said.values()), "registers")) <= 168  # of 384 threads, an SM has no more
    assert max(fusion_gpu.numbers_in(list(said.values()), "spilled bytes")) <= 128
