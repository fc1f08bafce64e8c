"""Layers of float8: which they are, how far they round, where they are refused, and that checkpoints do not show them.

torchao emulates them on CPUs here; a run on a CPU refuses them."""

import logging
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file

from jobs import exit_codes
from jobs.recipes.pretrain import digits_smoke
from pipeline.checkpoints.manifest import manifest_from_json
from pipeline.models import ModelConfig
from pipeline.models.build import blocks_of, compile_blocks, initial_of, unfilled_model
from pipeline.models.float8 import Scaling, float8_fault, use_float8
from pipeline.models.vit import ViT
from pipeline.ranks.host import free_port
from pipeline.ranks.world import World
from pipeline.training import kernels
from pipeline.training.prepare import facts_to_agree, prepare
from pipeline.training.saving.save import describe, differences_in_bits
from pipeline.training.settings.job import EngineConfig, TrainingJob
from pipeline.training.start import starting_model
from pipeline.training.zero.batch_plan import plan_batch
from shards.errors import UserError
from tests.rigs.forks import ONE_THREAD
from tests.rigs.processes import one_world, run_ranks
from tests.rigs.training import STEPS, FinishedRuns, losses, pretrain_words, resumed_steps, start

CHECKOUT = Path(__file__).resolve().parents[3]
CPU, GPU = torch.device("cpu"), torch.device("cuda")
SCALINGS: tuple[Scaling, ...] = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
LAYERS = ("attention.qkv", "attention.out", "mlp.dense1", "mlp.dense2")
MODEL = ModelConfig(
    name="vit", image_size=16, num_classes=10, patch=4, depth=2, width=32, mlp_width=64, num_heads=2, position_std=0.3
)
NUM_IMAGES = 3  # of 17 tokens: 51, which no GPU's products of float8 take
Step = tuple[torch.Tensor, torch.Tensor]
Float8 = Literal["off"] | Scaling


def job_with(float8: Float8, **engine: Any) -> TrainingJob:
    return replace(digits_smoke(), model=MODEL, engine=EngineConfig(float8=float8, **({"precision": "bf16"} | engine)))


def step_of(model: torch.nn.Module) -> Step:
    """The outputs for a few images, and the gradients of their mean square, all in one."""
    generator = torch.Generator().manual_seed(1)
    logits = model(torch.randint(0, 256, (NUM_IMAGES, 16, 16, 3), dtype=torch.uint8, generator=generator)).float()
    logits.square().mean().backward()
    return logits.detach(), torch.cat(
        [each.grad.float().flatten() for each in model.parameters() if each.grad is not None]
    )


def bf16_model() -> ViT:
    model, generator = ViT(MODEL), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # noise: a head of zeros gives no gradients to all below
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(initial_of(MODEL, name, tuple(parameter.shape), seed=0) + 0.05 * noise)
    return model.to(torch.bfloat16)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def test_the_four_layers_of_each_block_change_and_no_parameter() -> None:
    with torch.device("meta"):
        model = unfilled_model(replace(MODEL, pooling="attention", qk_norm=True))
    types = {name: type(module) for name, module in model.named_modules()}
    parameters = dict(model.named_parameters())
    use_float8(model, "rowwise")
    changed = {name for name, module in model.named_modules() if type(module) is not types[name]}
    assert changed == {f"blocks.{number}.{layer}" for number in range(2) for layer in LAYERS}
    found = dict(model.named_parameters())
    assert list(found) == list(parameters)
    assert all(found[name] is parameters[name] for name in parameters)
    assert list(model.state_dict()) == list(parameters)


def test_emulated_layers_round_to_float8_and_stay_near() -> None:
    exact = step_of(bf16_model())
    for scaling in SCALINGS:
        model = bf16_model()
        use_float8(model, scaling, is_emulated=True)
        errors = [error(*pair) for pair in zip(step_of(model), exact, strict=True)]
        # Three bits of mantissa: a relative error of 0.03 each, eight layers deep. bf16 itself is 0.01 from fp32.
        assert all(0.03 < each < 0.2 for each in errors), (scaling, errors)


def test_products_of_float8_get_sums_that_gpus_can_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """The products themselves, which PyTorch has for CPUs, too, without this limit."""
    inner, product = [], torch._scaled_mm

    def listening(one: torch.Tensor, other: torch.Tensor, **options: Any) -> torch.Tensor:
        assert one.dtype.itemsize == other.dtype.itemsize == 1
        inner.append(one.shape[1])
        return product(one, other, **options)

    model, emulated = bf16_model(), bf16_model()
    use_float8(model, "rowwise")
    use_float8(emulated, "rowwise", is_emulated=True)
    monkeypatch.setattr(torch, "_scaled_mm", listening)
    found = step_of(model)
    assert set(inner) == {32, 64, 96}, "51 tokens were not padded to 64, or a width is missing"
    assert len(inner) == 3 * len(LAYERS) * 2
    for one, other in zip(found, step_of(emulated), strict=True):
        assert error(one, other) < 0.01, "what is emulated is something else"


def test_a_run_builds_the_layers_that_it_asks_for() -> None:
    for job, names in ((job_with("off"), {"Linear"}), (job_with("tensorwise"), {"Float8Linear"})):
        for block in blocks_of(starting_model(job, is_compiled=False)):
            assert {type(block.get_submodule(name)).__name__ for name in LAYERS} == names
    rounded: dict[Scaling, bool] = {"tensorwise": False, "rowwise": True}
    for scaling, is_rounded in rounded.items():
        for block in blocks_of(starting_model(job_with(scaling), is_compiled=True)):
            compiled: Any = block._compiled_call_impl
            assert compiled.get_compiler_config()["emulate_precision_casts"] is is_rounded


def gpu_of(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that nothing here uses."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)


def test_what_a_device_lacks_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert float8_fault(CPU) == "a CPU gains nothing from float8"
    gpu_of((8, 0), monkeypatch)
    assert float8_fault(GPU) == "NVIDIA A100 has compute capability 8.0, and products of float8 begin with 8.9"
    for capability in ((8, 9), (9, 0), (10, 0)):
        gpu_of(capability, monkeypatch)
        assert not float8_fault(GPU)
    monkeypatch.setattr("pipeline.models.float8.version", lambda _: "0.17.0")
    assert float8_fault(GPU) == "torchao is 0.17.0, not 0.18.x (pip install 'patchline[float8]')"
    monkeypatch.setitem(sys.modules, "torchao", None)
    assert float8_fault(GPU) == "torchao is not installed (pip install 'patchline[float8]')"


def test_float8_needs_bf16_and_is_slow_without_compiled_blocks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gpu_of((9, 0), monkeypatch)
    monkeypatch.setattr(kernels, "gather_json", lambda fault, **_: [fault])
    world, job = replace(one_world(), device=GPU), job_with("rowwise", precision="auto")
    kept = replace(job, engine=replace(job.engine, float8="off", precision="fp32"))  # as the checkpoint has it
    kernels.refuse_missing_float8(kept, world, is_compiled=False)
    with pytest.raises(UserError, match=r"the run's precision is auto; allowed: bf16"):
        kernels.refuse_missing_float8(job, world, is_compiled=True)
    for is_compiled in (True, False):
        kernels.refuse_missing_float8(job_with("rowwise"), world, is_compiled=is_compiled)
        said = [record for record in caplog.records if record.levelno == logging.WARNING]
        assert len(said) == (not is_compiled)
    assert "'rowwise' in blocks that are not compiled" in caplog.text


def refused(world: World) -> str:
    """What this rank says of float8 on its CPU."""
    with pytest.raises(UserError) as caught:
        kernels.refuse_missing_float8(job_with("tensorwise"), world, is_compiled=False)
    return str(caught.value)


def test_ranks_on_cpus_refuse_it_with_one_message() -> None:
    said = run_ranks(refused, num_ranks=2)
    assert said[0] == said[1]
    assert "'tensorwise', which ranks 0, 1 of 2 cannot compute: a CPU gains nothing from float8; allowed" in said[0]


@pytest.mark.long
def test_all_ranks_of_a_run_on_cpus_end_with_it(
    digits_url: str, run_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = pretrain_words(digits_url, run_dir, "--engine.precision", "bf16", "--engine.float8", "tensorwise")
    ranks = start(words, num_ranks=2, log_dir=tmp_path)
    assert ranks.wait() == exit_codes.USER_MISTAKE
    assert [process.returncode for process in ranks.processes] == [exit_codes.USER_MISTAKE] * 2
    for said in (capfd.readouterr().err, (tmp_path / "rank-1.log").read_text()):
        assert "engine.float8 is 'tensorwise', which ranks 0, 1 of 2 cannot compute" in said
        assert "Traceback" not in said


def test_ranks_compare_their_torchao_and_checkpoints_record_the_scaling(digits_url: str, run_dir: Path) -> None:
    plan = plan_batch(32, micro_batch=0, num_ranks=1, lanes=8)
    asked: tuple[Float8, ...] = ("off", "rowwise")
    records = [describe(job_with(each), one_world(), plan=plan, is_compiled=True) for each in asked]
    assert "engine.float8 off, now rowwise" in differences_in_bits(*records)
    for float8 in asked:
        job = job_with(float8)
        job = replace(job, run_dir=str(run_dir), data=replace(job.data, url=digits_url))
        facts = facts_to_agree(prepare(job, one_world()))
        assert ("torchao" in facts) is (float8 == "rowwise")


@pytest.mark.long
def test_compiled_blocks_of_float8_are_whole_graphs() -> None:
    """Also where stochastic depth computes a number of images that differs from step to step."""
    for scaling in SCALINGS:
        exact, compiled = bf16_model(), bf16_model()
        for model in (exact, compiled):
            use_float8(model, scaling)
        compile_blocks(compiled, backend="aot_eager")
        torch._dynamo.utils.counters.clear()
        for kept in ((5, 3), (4, 6), (2, 5)):
            images = torch.zeros(7, 16, 16, 3, dtype=torch.uint8)
            inputs = (images, torch.ones(2, 7, 2), None, [tuple(map(torch.arange, kept))] * 2)
            found, expected = (model(*inputs) for model in (compiled, exact))
            assert error(found.detach().float(), expected.detach().float()) < 0.01
            found.square().mean().backward()
        assert not torch._dynamo.utils.counters["graph_break"]


WITHOUT_TORCHAO = "import sys; sys.modules['torchao'] = None; from jobs.cli import main; sys.exit(main(sys.argv[1:]))"


def ended(command: list[str], *, num_ranks: int = 1) -> None:
    """Runs a command of this Python as this many ranks, each of which must end well."""
    shared = {**os.environ, **ONE_THREAD, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = []
    for rank in range(num_ranks):
        own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
        environ = shared | {name: str(value) for name, value in own.items()}
        processes.append(subprocess.Popen([sys.executable, *command], env=environ, cwd=CHECKOUT))
    assert [process.wait(300) for process in processes] == [0] * num_ranks


def manifest_of(run_dir: Path) -> Any:
    (path,) = run_dir.glob(f"checkpoints/step-{STEPS:08d}/*/MANIFEST.json")
    return manifest_from_json(path.read_bytes())


@pytest.mark.long
@pytest.mark.parametrize(("stage", "num_ranks"), [("1", 1), ("2", 2)])
def test_checkpoints_are_those_of_any_run(
    digits_url: str, finished_runs: FinishedRuns, run_dir: Path, tmp_path: Path, stage: str, num_ranks: int
) -> None:
    """They are continued with the same bits, and without float8, evaluated and exported where there is no torchao."""
    options = ("--engine.zero-stage", stage, "--engine.precision", "bf16")
    plain = finished_runs.get(num_ranks, *options)
    words = pretrain_words(digits_url, run_dir, *options)
    in_float8 = ["-m", "tests.rigs.emulated_float8", *words, "--engine.float8", "rowwise"]
    ended(in_float8, num_ranks=num_ranks)

    found, expected = manifest_of(run_dir), manifest_of(plain)
    assert found.tensors == expected.tensors
    assert (found.record["engine"]["float8"], expected.record["engine"]["float8"]) == ("rowwise", "off")
    ours, theirs = (load_file(each / "weights" / "model.safetensors") for each in (run_dir, plain))
    assert {name: (each.shape, each.dtype) for name, each in ours.items()} == {
        name: (each.shape, each.dtype) for name, each in theirs.items()
    }
    assert losses(run_dir) != losses(plain)
    assert losses(run_dir) == pytest.approx(losses(plain), abs=0.05)

    (run_dir / "DONE").unlink()
    for gone in (run_dir / "weights", *run_dir.glob(f"checkpoints/step-{STEPS:08d}")):
        shutil.rmtree(gone)
    ended(in_float8, num_ranks=num_ranks)
    assert resumed_steps(run_dir) == [0, STEPS - 4]
    again = load_file(run_dir / "weights" / "model.safetensors")
    assert all(torch.equal(ours[name], again[name]) for name in ours)

    ended(["-c", WITHOUT_TORCHAO, *words, "--steps", str(STEPS + 4), "--extend"], num_ranks=num_ranks)
    assert resumed_steps(run_dir) == [0, STEPS - 4, STEPS]
    ended(["-c", WITHOUT_TORCHAO, "evaluate", "--weights", str(run_dir), "--data.url", digits_url])
    ended(["-c", WITHOUT_TORCHAO, "export", str(run_dir), "--out", str(tmp_path / "weights"), "--format", "timm"])
