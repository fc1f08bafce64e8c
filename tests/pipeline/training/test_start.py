"""Where a run starts from."""

import logging
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, cast

import pytest
import torch

from jobs.recipes.finetune import digits_48
from jobs.recipes.pretrain import digits_smoke
from pipeline.models import ModelConfig, build_model
from pipeline.models.attention import Layer
from pipeline.models.build import initial_tensor
from pipeline.models.positions import resample_position_embeddings
from pipeline.models.weights.folder import save_weights
from pipeline.runs.starts import StartTimes
from pipeline.training import decisions, kernels, start
from pipeline.training.prepare import Prepared, starting_weights
from pipeline.training.settings.job import EngineConfig, InitialConfig, TrainingJob
from pipeline.training.settings.tokens import TokensConfig
from pipeline.training.zero.batch_plan import BatchPlan
from shards.errors import UserError, WillNotSucceedError
from tests.rigs.processes import one_world


def with_classes(job: TrainingJob) -> TrainingJob:
    return replace(job, model=replace(job.model, num_classes=10))


def test_scratch_is_the_initial_value_of_the_seed() -> None:
    job = replace(with_classes(digits_smoke()), seed=3)
    shape = (1, 17, 128)
    expected = initial_tensor("embed.position", shape, seed=3, position_std=0.3)
    assert torch.equal(starting_weights(job)("embed.position"), expected)


def test_fine_tuning_takes_the_weights_with_a_new_head_and_a_larger_grid(tmp_path: Path) -> None:
    source = with_classes(digits_smoke()).model
    model = build_model(source, seed=1)
    with torch.no_grad():
        model.head.weight.normal_()
    state = model.state_dict()
    save_weights(tmp_path / "weights", config=source, labels=("a",) * 10, tensor=lambda name: state[name])
    job = replace(with_classes(digits_48()), initial=InitialConfig(weights=str(tmp_path / "weights")))

    tensor = starting_weights(job)

    assert torch.equal(tensor("blocks.0.attention.qkv.weight"), state["blocks.0.attention.qkv.weight"])
    assert tensor("embed.position").shape == (1, 1 + 36, 128)
    assert torch.count_nonzero(tensor("head.weight")) == 0
    with pytest.raises(UserError, match=r"blocks\.0\.norm1\.weight is \[128\], the model needs \[64\]"):
        starting_weights(replace(job, model=replace(job.model, width=64)))


@pytest.mark.parametrize(("size", "is_kept"), [(32, True), (48, False)])
def test_positions_that_are_not_resampled_start_anew_on_another_grid(size: int, is_kept: bool, tmp_path: Path) -> None:
    source = with_classes(digits_smoke()).model
    state = build_model(source, seed=1).state_dict()
    save_weights(tmp_path / "weights", config=source, labels=("a",) * 10, tensor=lambda name: state[name])
    job = with_classes(digits_48())
    initial = InitialConfig(weights=str(tmp_path / "weights"), resample="none")
    job = replace(job, initial=initial, model=replace(job.model, image_size=size))

    tensor, scratch = starting_weights(job), starting_weights(replace(job, initial=InitialConfig()))

    expected = state["embed.position"] if is_kept else scratch("embed.position")
    assert torch.equal(tensor("embed.position"), expected)
    assert torch.equal(tensor("blocks.0.attention.qkv.weight"), state["blocks.0.attention.qkv.weight"])


def test_positions_are_resampled_as_the_job_says(tmp_path: Path) -> None:
    source = with_classes(digits_smoke()).model
    state = build_model(source, seed=1).state_dict()
    save_weights(tmp_path / "weights", config=source, labels=("a",) * 10, tensor=lambda name: state[name])
    initial = InitialConfig(weights=str(tmp_path / "weights"), resample="timm")
    position = starting_weights(replace(with_classes(digits_48()), initial=initial))("embed.position")
    table = state["embed.position"][0]
    assert torch.equal(position[0], resample_position_embeddings(table, from_grid=(4, 4), to_grid=(6, 6), mode="timm"))


@pytest.mark.parametrize(
    ("planned", "tried", "checked"),
    [
        pytest.param(1, 1, [1], id="the trial went well"),
        pytest.param(1, 2, [1, 2], id="several passes now: DeepSpeed adds them up in other code"),
        pytest.param(2, 4, [2], id="there were several before"),
    ],
)
def test_gradients_are_checked_as_they_are_added_up(
    monkeypatch: pytest.MonkeyPatch, planned: int, tried: int, checked: list[int]
) -> None:
    def plan_of(accumulation: int) -> BatchPlan:
        return BatchPlan(global_batch=16, micro_batch=8 // accumulation, accumulation=accumulation, num_ranks=2)

    seen = []
    monkeypatch.setattr(decisions, "agreed_fit", lambda *_, **__: SimpleNamespace(plan=plan_of(planned), why=""))
    monkeypatch.setattr(start, "_built", lambda *_, **__: (None, plan_of(tried)))
    monkeypatch.setattr(start, "_fill_from_weights", lambda *_: None)
    decided = []

    def check(job: TrainingJob, plan: BatchPlan, *_: object) -> None:
        seen.append(plan.accumulation)
        decided.append((job.engine.attention, job.engine.compile))

    def with_attention(job: TrainingJob, *_: object, **__: object) -> TrainingJob:
        return replace(job, engine=replace(job.engine, attention="math"))

    for module in (start, decisions):
        monkeypatch.setattr(module, "checks_gradients", lambda *_: True)
        monkeypatch.setattr(module, "check_gradients", check)
    monkeypatch.setattr(decisions, "with_attention", with_attention)
    other: Any = None
    prepared = Prepared(
        job=with_classes(digits_smoke()),
        world=one_world(1, 2),
        is_compiled=True,
        decisions=(),
        extend=False,
        held_out={},
        **dict.fromkeys(("plan", "budget", "run_dir", "store", "stream", "fewshot", "teacher"), other),
    )
    checkpoints: Any = None
    controls: Any = SimpleNamespace(start_times=StartTimes(), times=None)
    assert start.start_engine(prepared, checkpoints, None, controls).plan == plan_of(tried)
    assert seen == checked
    assert set(decided) == {("math", "on")}, "with the kernel and the compiled blocks of the run"


def test_it_is_said_that_patches_are_resized(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    small = ModelConfig(name="vit", image_size=16, patch=4, depth=1, width=8, mlp_width=8, num_heads=2, num_classes=2)
    state = build_model(small).state_dict()
    save_weights(tmp_path / "w", config=small, labels=("a", "b"), tensor=lambda name: state[name])
    initial = InitialConfig(weights=str(tmp_path / "w"), patch="resize")
    job = replace(digits_smoke(), model=replace(small, patch=8), initial=initial)
    with caplog.at_level(logging.INFO):
        tensor = starting_weights(job, say=True)
    assert "w is resized from 4 x 4 to 8 x 8 px, for a grid of 2 x 2 patches" in caplog.text
    assert tensor("embed.patch.weight").shape == (8, 8 * 8 * 3)
    assert tensor("embed.position").shape == (1, 1 + 2 * 2, 8)


@pytest.mark.parametrize(
    ("asked", "wrong", "expected"),
    [
        ("auto", (), "on"),
        ("auto", ("on",), "off"),  # the run is right without it
        ("auto", ("on", "off"), None),
        ("on", ("on",), None),  # the user's own wish is not dropped
        ("off", (), "off"),
    ],
)
def test_overlap_is_on_where_the_check_passes_with_it(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    asked: Literal["auto", "on", "off"],
    wrong: tuple[str, ...],
    expected: str | None,
) -> None:
    """On a GPU that nothing here uses: only the check is replaced."""

    def check(job: TrainingJob, *_: object) -> None:
        if job.engine.overlap in wrong:
            raise WillNotSucceedError("the gradients that reach the optimiser are wrong")

    monkeypatch.setattr(decisions, "check_gradients", check)
    world = replace(one_world(), num_ranks=2, device=torch.device("cuda"))
    plan = BatchPlan(global_batch=4, micro_batch=2, accumulation=1, num_ranks=2)
    job = replace(with_classes(digits_smoke()), engine=EngineConfig(overlap=asked))
    if expected is None:
        with pytest.raises(WillNotSucceedError, match="are wrong"):
            decisions.with_checked_overlap(job, plan, world)
        return
    assert decisions.with_checked_overlap(job, plan, world).engine.overlap == expected
    assert ("engine.overlap auto is off: the gradients" in caplog.text) is bool(wrong)


def test_a_run_on_a_cpu_overlaps_only_if_asked() -> None:
    plan = BatchPlan(global_batch=4, micro_batch=2, accumulation=1, num_ranks=2)
    job = with_classes(digits_smoke())
    assert decisions.with_checked_overlap(job, plan, one_world()).engine.overlap == "off"


def test_the_fastest_kernel_of_attention_is_used_by_all_ranks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On a GPU that nothing here uses: what a kernel takes is said by the test."""
    took: dict[str, float | str] = {"flash": 3e-3, "cudnn": "no kernel for 17 tokens", "efficient": 2e-3, "math": 4e-3}
    took |= dict.fromkeys(("flex", "flash3", "cudnn_packed"), 1e-3)
    used: list[str] = []
    shapes = set()

    def seconds(name: str, shape: tuple[int, ...], **_: object) -> float | str:
        shapes.add(shape)
        return took[name]

    monkeypatch.setattr(decisions, "kernel_seconds", seconds)
    monkeypatch.setattr(decisions, "use_kernel", used.append)
    other = {"seconds": {"flash": 1e-3, "efficient": 2e-3, "math": 4e-3}, "why": ""}
    monkeypatch.setattr(decisions, "gather_json", lambda value, **_: [value, other])
    world = replace(one_world(0, 2), device=torch.device("cuda"))

    def decided(asked: str, *, deterministic: bool = False, record: Any = None) -> str:
        config = EngineConfig(attention=cast("Any", asked), precision="bf16", deterministic=deterministic)
        job = replace(with_classes(digits_smoke()), engine=config)
        return decisions.with_attention(job, world, record=record).engine.attention

    with caplog.at_level(logging.INFO):
        assert decided("auto") == "efficient"
    measured = "963 images: flash 3 ms, efficient 2 ms, math 4 ms"
    assert f"attention by efficient (engine.attention auto; {measured})" in caplog.text
    size = digits_smoke().model.size
    assert shapes == {(963, size.num_heads, 17, size.width // size.num_heads)}
    assert decided("math") == "math"
    assert used == ["efficient", "math"]
    assert decided("auto", deterministic=True) == "auto"  # PyTorch chooses, without a measurement
    with pytest.raises(
        UserError, match=r"'cudnn', which the GPU of rank 0 cannot compute for 17 .* \(no kernel for 17 tokens\)"
    ):
        decided("cudnn")
    other["seconds"] = {"math": 5e-3}  # an older GPU: all take what it has
    assert decided("auto") == "math"
    other["seconds"] = {"flash": 1e-3, "efficient": 2e-3, "math": 4e-3}
    took["flash"] = 2.07e-3
    with caplog.at_level(logging.INFO):
        assert decided("auto", record={"engine": {"attention": "flash"}}) == "flash", "it is 3.5 % slower"
    assert "attention by flash (engine.attention auto; the checkpoint has flash; 963 images: flash 2.07" in caplog.text
    for record in ({"engine": {"attention": "cudnn"}}, {"engine": {"attention": ["flash"]}}, {"engine": "flash"}, {}):
        assert decided("auto", record=record) == "efficient"
    del used[3:]
    other |= {"seconds": {}, "why": "no memory"}
    with pytest.raises(UserError, match=r"'flash', which the GPU of rank 1 cannot .* \(no memory\); allowed: auto"):
        decided("flash")
    by_name = ["flex", "flash3", "cudnn_packed"]
    other["seconds"] = {"math": 5e-3} | dict.fromkeys(by_name, 1e-3)
    assert decided("auto") == "math", "the faster ones are not tried"
    assert [decided(name) for name in by_name] == by_name
    assert used == ["efficient", "math", "math", "math", *by_name]


@pytest.mark.parametrize(
    ("tokens", "others"),
    [
        pytest.param(TokensConfig(patch_sizes=(4, 16)), {17, 5}, id="patches of 4 and 16 px, and 8 px in evaluations"),
        pytest.param(
            TokensConfig(image_sizes=(16, 24), size_steps=(10, 20), patch_sizes=(4, 8)),
            {37, 17, 10, 5},
            id="smaller images",
        ),
        pytest.param(TokensConfig(patch_dropout=0.5, whole_steps=9), {17}, id="all patches at the end"),
    ],
)
def test_a_kernel_must_support_each_number_of_tokens(
    tokens: TokensConfig, others: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a step fails late in the run, or takes another kernel, which the run then reports as a wrong one."""
    tried = list[tuple[str, int]]()
    cannot: set[tuple[str, int]] = {("cudnn", min(others)), ("cudnn_packed", max(others))}

    def seconds(name: str, shape: tuple[int, ...], *, layer: Layer, **_: object) -> float | str:
        tried.append((name, shape[2]))
        layer()(torch.zeros(3, 1, *shape[1:]))
        return "none of this length" if (name, shape[2]) in cannot else {"cudnn": 1e-3}.get(name, 2e-3)

    monkeypatch.setattr(decisions, "kernel_seconds", seconds)
    monkeypatch.setattr(decisions, "use_kernel", lambda _: None)
    monkeypatch.setattr(decisions, "gather_json", lambda value, **_: [value])
    world = replace(one_world(), device=torch.device("cuda"))

    def decided(asked: str) -> str:
        job = replace(with_classes(digits_smoke()), tokens=tokens)
        job = replace(job, engine=EngineConfig(attention=cast("Any", asked), precision="bf16"))
        return decisions.with_attention(job, world).engine.attention

    assert decided("auto") == "flash", "the second fastest"
    first = 9 if tokens.patch_dropout else 65
    assert {num_tokens for name, num_tokens in tried if name == "flash"} == {first, *others}
    with pytest.raises(UserError, match=rf"'cudnn_packed', which .* \({max(others)} tokens: none of this length\)"):
        decided("cudnn_packed")
    tried.clear()
    assert decided("flex") == "flex"
    assert tried == [("flex", first)], "it takes any number, and long to compile"


@pytest.mark.parametrize(
    ("device", "is_compiled", "why"),
    [("cpu", True, "a CPU has none"), ("cuda", False, "the blocks are not compiled"), ("cuda", True, "")],
)
def test_graphs_are_refused_where_there_are_none(device: str, is_compiled: bool, why: str) -> None:
    world = replace(one_world(), device=torch.device(device))
    job = replace(with_classes(digits_smoke()), engine=EngineConfig(cuda_graphs=True))
    with (
        pytest.raises(UserError, match=f"engine.cuda_graphs is on, but {why}; allowed here: --engine.no-cuda-graphs")
        if why
        else nullcontext()
    ):
        kernels.refuse_missing_graphs(job, world, is_compiled=is_compiled)
    kernels.refuse_missing_graphs(with_classes(digits_smoke()), world, is_compiled=is_compiled)


def test_a_cpu_has_one_way_to_compute_attention() -> None:
    job = with_classes(digits_smoke())
    assert decisions.with_attention(job, one_world()) == job
    with pytest.raises(UserError, match=r"engine\.attention is 'flash', but a CPU has one way"):
        decisions.with_attention(replace(job, engine=EngineConfig(attention="flash")), one_world())
