"""The rates of a plan: which measured step counts for which job, and files that are refused."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jobs.recipes.paper_jft import vit_h14_jft
from pipeline.models.flops import training_flops
from pipeline.planning.rates import PACKAGED, PLANNED_MFU, Rates, Speeds, rates_from, speeds_of, steps_in
from pipeline.planning.step_time import EIGHT_A_NODE, GPUS, SLOWEST_HOST, host_seconds, step_time
from pipeline.training.settings.job import TrainingJob
from pipeline.training.zero.batch_plan import plan_batch
from shards.errors import UserError

RATES = [436.0, 428.0, 432.0]
TERAFLOPS = 3 * 2 * 0.16721  # of an image of ViT-H/14, forward and backward


def part(kind: str = "step", *, images: int = 256, **changed: Any) -> dict[str, Any]:
    """A part of `patchline doctor --gpu` as it writes it, with more fields than a plan takes."""
    asked = {"kind": kind, "device": "cuda", "model": "vit_h14", "image_size": 224, "compiled": True, "batch": 0}
    result = {"micro_batch": images, "images_per_second": RATES, "attention": "cudnn", "time": {"classes": {}}}
    return {
        "part": asked | {name: changed[name] for name in changed if name not in result and name != "host_milliseconds"},
        "seconds": 40.0,
        "result": result
        | {name: changed[name] for name in ("images_per_second", "host_milliseconds") if name in changed},
    }


def result_of(*parts: dict[str, Any], name: str = "NVIDIA H200") -> dict[str, Any]:
    about = {"device": "cuda", "name": name, "num_gpus": 1, "cores": 16, "torch": "2.11.0+cu130", "cuda": "13.0"}
    return {"about": about, "parts": {f"part {number}": one for number, one in enumerate(parts)}}


@pytest.fixture
def measured(tmp_path: Path) -> Callable[..., Rates]:
    def rates_of(*parts: dict[str, Any], **about: Any) -> Rates:
        file = tmp_path / "own.json"
        file.write_text(json.dumps(result_of(*parts, **about)))
        return Rates(results=(steps_in(file),))

    return rates_of


def job_of(*, model: dict[str, Any] | None = None, **engine: Any) -> TrainingJob:
    job = vit_h14_jft()
    changed = replace(job.model, num_classes=18_291, **(model or {}))
    return replace(job, model=changed, engine=replace(job.engine, precision="bf16", **engine))


def speeds(rates: Rates, job: TrainingJob | None = None, *, images: int = 256, gpu: str = "h200") -> Speeds:
    return speeds_of(job or job_of(), micro_batch=images, gpu=GPUS[gpu], name=gpu, rates=rates)


def test_a_rate_becomes_the_share_of_nominal_operations() -> None:
    found = speeds(rates_from())
    assert found.usual.mfu == pytest.approx(435.4 * TERAFLOPS / 989, rel=1e-3)
    assert found.least.mfu == pytest.approx(428.8 * TERAFLOPS / 989, rel=1e-3)
    assert found.most.mfu == pytest.approx(438.1 * TERAFLOPS / 989, rel=1e-3)
    assert found.source == (
        "vit_h14 compiled, 256 images a pass, measured on NVIDIA H200 (torch 2.11.0+cu130): Patchline's h200.json"
    )


def test_what_nobody_has_measured_has_the_published_figure() -> None:
    for found in (speeds(rates_from(), gpu="h100"), speeds(rates_from(), job_of(model={"image_size": 518}))):
        assert (found.least.mfu, found.usual.mfu, found.most.mfu, found.micro_batch) == (*[PLANNED_MFU] * 3, 0)
        assert found.source.startswith("nobody has measured this step of vit_h14 on h")


def test_the_users_word_counts_before_all_files() -> None:
    found = speeds(rates_from(mfu=0.5))
    assert (found.usual.mfu, found.source) == (0.5, "--mfu 0.5")


def test_the_users_file_counts_before_the_packages(measured: Callable[..., Rates], tmp_path: Path) -> None:
    measured(part(images_per_second=[200.0]))
    both = rates_from(str(tmp_path / "own.json"), gpu="h200")
    assert speeds(both).usual.mfu == pytest.approx(200 * TERAFLOPS / 989, rel=1e-3)
    assert f"(torch 2.11.0+cu130): {tmp_path / 'own.json'}" in speeds(both).source
    eager = speeds(both, job_of(compile="off"))
    assert "vit_h14 eager" in eager.source, "the file has no such step, and the package has"
    assert "Patchline's h200.json" in eager.source


@pytest.mark.parametrize(
    ("changed", "is_measured"),
    [
        pytest.param({"model": {"representation": False, "head_bias": 0.0}}, True, id="another head"),
        pytest.param({"model": {"pooling": "average"}}, True, id="another pooling"),
        pytest.param({"compile": "on"}, True, id="compiled, in other words"),
        pytest.param({"model": {"depth": 31}}, False, id="other sizes"),
        pytest.param({"model": {"position": "relative"}}, False, id="positions in every layer"),
        pytest.param({"compile": "off"}, False, id="eager"),
        pytest.param({"zero_stage": 3}, False, id="eager, since ZeRO-3 compiles nothing"),
        pytest.param({"compile": "tuned"}, False, id="tuned"),
        pytest.param({"attention": "flash"}, False, id="another kernel of attention"),
        pytest.param({"deterministic": True}, False, id="deterministic kernels"),
        pytest.param({"float8": "rowwise"}, False, id="float8"),
        pytest.param({"cuda_graphs": True}, False, id="CUDA graphs"),
        pytest.param({"fused_mlp": True}, False, id="another MLP"),
        pytest.param({"overlap": "off", "reduce_precision": "bf16"}, True, id="other exchanges"),
    ],
)
def test_a_step_counts_for_jobs_with_the_same_kernels(
    measured: Callable[..., Rates], changed: dict[str, Any], is_measured: bool
) -> None:
    assert ("measured on" in speeds(measured(part()), job_of(**changed)).source) is is_measured


def test_a_frozen_backbone_was_not_measured(measured: Callable[..., Rates]) -> None:
    job = job_of()
    frozen = replace(job, optimizer=replace(job.optimizer, freeze_backbone=True))
    assert speeds(measured(part()), frozen).usual.mfu == PLANNED_MFU


def test_small_differences_are_said(measured: Callable[..., Rates]) -> None:
    found = speeds(measured(part()), job_of(model={"dropout": 0.1}, zero_stage=2))
    assert "256 images a pass, with dropout 0.0, zero_stage 1, measured on" in found.source


def test_the_nearest_micro_batch_counts(measured: Callable[..., Rates]) -> None:
    rates = measured(part(), part("rank", images=64), part("rank", images=16))
    taken = {images: speeds(rates, images=images).micro_batch for images in (4, 16, 31, 33, 64, 128, 256, 2048)}
    assert taken == {4: 16, 16: 16, 31: 16, 33: 64, 64: 64, 128: 64, 256: 256, 2048: 256}


def test_a_part_with_settings_counts_for_the_job_that_has_them(measured: Callable[..., Rates]) -> None:
    rates = measured(part(), part(settings={"engine.attention": "flash"}, images_per_second=[390.0]))
    assert speeds(rates, job_of(attention="flash")).usual.mfu == pytest.approx(390 * TERAFLOPS / 989, rel=1e-3)
    assert "attention flash" in speeds(rates, job_of(attention="flash")).source
    assert speeds(rates).usual.mfu == pytest.approx(432 * TERAFLOPS / 989, rel=1e-3)


def test_a_rate_that_was_measured_with_recomputed_blocks_is_what_a_plan_of_them_says(
    measured: Callable[..., Rates],
) -> None:
    job = job_of(activation_checkpointing="full")
    rates = measured(part(settings={"engine.activation_checkpointing": "full"}, images_per_second=[330.0]))
    plan = plan_batch(256, micro_batch=256, num_ranks=1, lanes=1)
    speed, flops = speeds(rates, job).usual, training_flops(job.model)
    step = step_time(job, plan, gpu=GPUS["h200"], network=EIGHT_A_NODE, train_flops=flops, speed=speed)
    assert 256 / step.seconds == pytest.approx(330, rel=1e-3)


def test_what_no_run_does_is_left_out(measured: Callable[..., Rates]) -> None:
    failed = {name: value for name, value in part().items() if name != "result"} | {"failed": "out of memory"}
    odd = (part(without=["kept sums"]), part(settings={"inductor.x": True}), failed, part("loader"))
    (steps,) = measured(*odd, part()).results
    assert len(steps) == 1


def test_the_host_takes_as_long_for_a_tensor_as_where_it_was_measured(measured: Callable[..., Rates]) -> None:
    ((step,),) = measured(part()).results
    assert speeds(measured(part())).least.host == SLOWEST_HOST
    seconds = host_seconds(step.job, num_ranks=1)
    found = speeds(measured(part(), part("rank", images=16, host_milliseconds=2000 * seconds)))
    assert found.usual.host == found.least.host == pytest.approx(2)
    assert found.host_source.startswith("Measured for vit_h14 compiled on NVIDIA H200")
    slower = speeds(measured(part("rank", images=16, host_milliseconds=4000 * seconds)), job_of(model={"depth": 16}))
    assert slower.usual.host == pytest.approx(4), "of another model, for each tensor"


def test_the_package_has_steps_of_the_papers_models() -> None:
    (file,) = PACKAGED.glob("*.json")
    names = {(step.job.model.name, step.job.engine.compile) for step in steps_in(file)}
    assert {(name, how) for name in ("vit_b16", "vit_l16", "vit_h14") for how in ("on", "off")} <= names


def without(found: dict[str, Any], *path: str) -> dict[str, Any]:
    inner = found
    for name in path[:-1]:
        inner = inner[name]
    del inner[path[-1]]
    return found


RESULT = {"micro_batch": 256, "images_per_second": RATES}
REFUSED = [
    ("not JSON", "images/s: 435", "which no plan can use: Expecting value"),
    ("no text", b"\xff\xfe", "which no plan can use: 'utf-8' codec can't decode"),
    ("NaN", '{"parts": NaN}', "NaN is not a JSON number"),
    ("too deep", "[" * 100_000, "nested more than 64 deep"),
    ("a list", [], "it has no parts"),
    ("another schema", {"figures": [1, 2]}, "it has no parts"),
    ("no machine", {"parts": {}}, "about is None; allowed: an object"),
    ("no name", without(result_of(part()), "about", "name"), "about.name is missing"),
    ("a CPU", result_of(part()) | {"about": {"device": "cpu", "name": "CPU", "torch": "2"}}, "it is from 'CPU', which"),
    (
        "an unknown GPU",
        result_of(part(), name="Tesla V100"),
        "it is from 'Tesla V100', which is no GPU that --gpu knows",
    ),
    ("no step", result_of(part("loader")), "it has no training step"),
    ("a part that is a number", result_of(7), "parts.'part 0' is 7; allowed: an object with a part"),  # type: ignore[arg-type]
    ("no result", result_of(part() | {"result": None}), "parts.'part 0'.result is None; allowed: an object"),
    (
        "no rates",
        result_of(part(images_per_second=[])),
        "images_per_second is []; allowed: rates that the GPU can reach",
    ),
    (
        "rates as text",
        result_of(part(images_per_second=["435"])),
        "images_per_second.0 is '435'; allowed: a finite number",
    ),
    (
        "a rate of nothing",
        result_of(part(images_per_second=[0.0])),
        "images_per_second.0 is 0.0; allowed: above 0 to 1",
    ),
    ("faster than the GPU", result_of(part(images_per_second=[990.0])), "is [990.0]; allowed: rates that the GPU can"),
    ("no images", result_of(part(images=0)), "micro_batch is 0; allowed: 1 to"),
    ("a whole number as text", result_of(part(images="256")), "micro_batch is '256'; allowed: a whole number"),  # type: ignore[arg-type]
    ("true is no number", result_of(part(images=True)), "micro_batch is True; allowed: a whole number"),
    ("a host without time", result_of(part("rank", host_milliseconds=0)), "host_milliseconds is 0.0; allowed: above 0"),
    ("an absurd size", result_of(part(image_size=10**9)), "part: model.image_size is 1000000000; allowed: 1 to 16,384"),
    ("no such model", result_of(part(model="vit_x99")), "model.name is 'vit_x99', which is none of"),
    ("no such setting", result_of(part(settings={"engine.speed": 9})), "'engine.speed', which is no setting of a job"),
    (
        "a wrong value",
        result_of(part(settings={"engine.attention": "own"})),
        "engine.attention is 'own'; allowed: auto",
    ),
]


@pytest.mark.parametrize(("content", "words"), [pytest.param(*row[1:], id=row[0]) for row in REFUSED])
def test_files_that_are_refused(tmp_path: Path, content: Any, words: str) -> None:
    file = tmp_path / "own.json"
    data = content.encode() if isinstance(content, str) else content
    file.write_bytes(data if isinstance(data, bytes) else json.dumps(data).encode())
    with pytest.raises(UserError) as caught:
        steps_in(file)
    assert words in str(caught.value)
    assert str(caught.value).startswith(f"--measured is '{file}', which no plan can use: ")
    assert str(caught.value).endswith("; give the file that `patchline doctor --gpu --out FILE` wrote on your GPU")


def test_a_file_that_is_missing_or_too_large_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="which cannot be read: No such file or directory; give the file"):
        steps_in(tmp_path / "none.json")
    with pytest.raises(UserError, match=r"which (cannot be read: Is a directory|no plan can use)"):
        steps_in(tmp_path)
    large = tmp_path / "large.json"
    with large.open("wb") as file:
        file.truncate((16 << 20) + 1)
    with pytest.raises(UserError, match="larger than 16,777,216 bytes"):
        steps_in(large)
