"""`patchline doctor --gpu`: each part's result is kept, whatever becomes of others, and is drawn beside the plan."""

import copy
import json
import re
import subprocess
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal
from unittest import mock

import pytest
import torch
from torch.fx import Graph

from jobs import exit_codes
from jobs.monitor import doctor, gpu_trial
from jobs.monitor.gpu_trial import gpu_page, verdicts, words_of
from jobs.settings.runs import DoctorJob
from pipeline.machine import gpu_parts
from pipeline.machine.gpu_sizes import KEPT_SUMS, LAUNCHED_UPDATES, GpuPart, Question, parts_of
from pipeline.models.residuals import KeepResiduals
from pipeline.ranks import world
from pipeline.training.zero.update import UpdateWithoutWaiting
from shards.errors import UserError
from shards.output.quantities import number
from tests.rigs.forks import forks
from tests.rigs.processes import one_world
from tests.rigs.writer_kills import until

SHAPES = parts_of("cpu", num_gpus=0)["attention"].shapes


def measured(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def test_a_part_that_fails_loses_its_own_result_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = {
        "broken": GpuPart(kind="step", device="cpu", model="no_such_model", batch=2),
        "attention": GpuPart(kind="attention", device="cpu", seconds=0.1, shapes=SHAPES),
    }
    monkeypatch.setattr(gpu_trial, "parts_of", lambda *_, **__: parts)
    out = tmp_path / "gpu.json"
    job = DoctorJob(gpu=True, device="cpu", out=str(out))
    assert doctor.run(job, environ={}) == exit_codes.FAULTS_FOUND
    said = capsys.readouterr().out
    assert "no steps with float8: a CPU gains nothing from float8" in said
    assert "no steps with fused MLPs: QuACK has no kernels for a CPU" in said
    assert "[1/2] broken: it ended with 1: " in said
    assert "no_such_model" in said
    assert "1 part failed: broken" in said
    first = measured(out)
    assert list(first["parts"]) == ["broken", "attention"]
    times = first["parts"]["attention"]["result"]["milliseconds"]["ViT-Ti/16 at 32"]
    assert times["flash"] > 0
    assert isinstance(times["cudnn"], str)  # a CPU has none
    assert b"failed: " in out.with_suffix(".html").read_bytes()

    monkeypatch.setattr(gpu_trial, "parts_of", lambda *_, **__: {"attention": parts["attention"]})
    assert doctor.run(job, environ={}) == exit_codes.DONE
    assert "(kept)" in capsys.readouterr().out
    assert measured(out)["parts"] == first["parts"]  # the part that is no longer asked for stays


def test_an_interrupted_trial_loses_no_part_that_it_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also not one that comes after the part in which it was interrupted."""
    part = GpuPart(kind="attention", device="cpu", seconds=0.1, shapes=SHAPES)
    out, job = tmp_path / "gpu.json", DoctorJob(gpu=True, device="cpu", out=str(tmp_path / "gpu.json"))
    monkeypatch.setattr(gpu_trial, "parts_of", lambda *_, **__: {"last": part})
    assert doctor.run(job, environ={}) == exit_codes.DONE
    last = measured(out)["parts"]["last"]

    def interrupted(*_: object) -> Any:
        raise KeyboardInterrupt

    more = {name: replace(part, repeats=number) for number, name in enumerate(("first", "second"))}
    monkeypatch.setattr(gpu_trial, "parts_of", lambda *_, **__: {**more, "last": part})
    entry = {"part": {}, "seconds": 1.0, "failed": "the machine was gone"}
    monkeypatch.setattr(gpu_trial, "_measured", lambda each, _, **__: interrupted() if each.repeats else entry)
    with pytest.raises(KeyboardInterrupt):
        doctor.run(job, environ={})
    assert measured(out)["parts"] == {"first": entry | {"source": gpu_parts.source_digest()}, "last": last}


class Measured:
    """Takes the place of the processes of a GPU's trial: each part has the result that it is given, or fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, parts: dict[str, GpuPart]) -> None:
        self.results: dict[str, Any] = {}
        self.asked: list[GpuPart] = []
        self.about: dict[str, Any] = results()["about"] | {
            "lacks": {"float8": "no torchao"},
            "driver": "570",
        }
        monkeypatch.setattr(gpu_trial, "parts_of", lambda *_, **__: parts)
        monkeypatch.setattr(gpu_parts, "device_facts", lambda _: self.about)
        monkeypatch.setattr(gpu_trial, "_measured", self._measured)

    def _measured(self, part: GpuPart, *_: Any, **__: Any) -> dict[str, Any]:
        self.asked.append(part)
        name = part.question.option if part.question else part.kind
        outcome = {"result": self.results[name]} if name in self.results else {"failed": "out of memory"}
        return {"part": gpu_trial._plain(part), "seconds": 40.0} | outcome


QUESTION = Question(option="CUDA graphs", beside="step", settles="It.", expects="much")
PART = GpuPart(kind="step", device="cuda", model="vit_h14", compiled=True, expected_seconds=42.0)
GRAPHS = replace(PART, settings={"engine.cuda_graphs": True}, question=QUESTION)


def test_a_part_that_failed_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An earlier result stays in the file until there is another, although the part has changed since."""
    parts = {"step": PART}
    out, trial = tmp_path / "gpu.json", Measured(monkeypatch, parts)
    job = DoctorJob(gpu=True, out=str(out))
    assert doctor.run(job, environ={}) == exit_codes.FAULTS_FOUND
    assert "1 part to measure, about 42 s on an H200 (estimated)\n" in capsys.readouterr().out
    trial.results["step"] = STEP
    assert doctor.run(job, environ={}) == exit_codes.DONE
    assert "(40 s, 42 s estimated)\n" in capsys.readouterr().out
    parts["step"], first = replace(PART, batch=64), measured(out)["parts"]["step"]
    del trial.results["step"]
    for _ in range(2):
        assert doctor.run(job, environ={}) == exit_codes.FAULTS_FOUND
        assert measured(out)["parts"]["step"]["failed"] == "out of memory"
        assert measured(out)["parts"]["step"]["earlier"] == first
    trial.results["step"] = STEP
    assert doctor.run(job, environ={}) == exit_codes.DONE
    assert "earlier" not in measured(out)["parts"]["step"]
    assert [part.batch for part in trial.asked] == [0, 0, 64, 64, 64]


def test_an_option_has_the_kernel_and_the_batch_of_what_it_is_compared_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`auto` may choose another kernel in each process, and a batch that fits may not be the same. An option that is a
    kernel itself has its own. If the other part is measured again, and has another kernel, then so is the option."""
    flash = replace(QUESTION, option="flash", is_attention=True)
    parts = {
        "step": PART,
        "graphs": GRAPHS,
        "flash": replace(GRAPHS, question=flash, settings={"engine.attention": "flash"}),
    }
    out, trial = tmp_path / "gpu.json", Measured(monkeypatch, parts)
    trial.results = dict.fromkeys(("step", "CUDA graphs", "flash"), STEP)
    job = DoctorJob(gpu=True, out=str(out))
    for _ in range(2):
        assert doctor.run(job, environ={}) == exit_codes.DONE
        asked = [(dict(part.settings), part.kernel, part.batch) for part in trial.asked]
        assert asked == [
            ({}, "", 0),
            ({"engine.cuda_graphs": True}, "cudnn", 128),
            ({"engine.attention": "flash"}, "", 128),
        ]
    parts["step"] = replace(PART, seconds=9.0)
    trial.results["step"] = STEP | {"attention": "flash"}
    assert doctor.run(job, environ={}) == exit_codes.DONE
    assert [part.kernel for part in trial.asked[3:]] == ["", "flash"]


def test_a_step_has_the_kernel_of_its_part() -> None:
    """A CPU refuses all but auto, so a kernel that is obeyed is refused there."""
    part = GpuPart(kind="step", device="cpu", model="vit_ti16", image_size=32, batch=2, kernel="flash")
    with pytest.raises(UserError, match="attention is 'flash', but a CPU"):
        gpu_parts._Run(part.job(precision="fp32"), world.current_world("cpu"), part)


def test_a_result_of_other_code_is_kept_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parts, out = {"step": PART}, tmp_path / "gpu.json"
    trial = Measured(monkeypatch, parts)
    trial.results = {"step": STEP, "CUDA graphs": STEP}
    job = DoctorJob(gpu=True, out=str(out))
    monkeypatch.setattr(gpu_parts, "source_digest", lambda: "before")
    assert doctor.run(job, environ={}) == exit_codes.DONE
    parts["graphs"] = GRAPHS
    monkeypatch.undo()
    trial = Measured(monkeypatch, parts)
    trial.results = {"CUDA graphs": STEP}
    capsys.readouterr()
    assert doctor.run(job, environ={}) == exit_codes.DONE
    said = capsys.readouterr().out
    assert "(kept, measured with other code)\n" in said
    assert "CUDA graphs: not settled, since the parts were measured with different code\n" in said


@pytest.mark.parametrize("other", [{"name": "NVIDIA B200"}, {"driver": "580"}, {"torch": "2.11.0+cu130"}], ids=str)
def test_a_file_of_another_device_or_version_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: dict[str, str]
) -> None:
    out, trial = tmp_path / "gpu.json", Measured(monkeypatch, {"step": PART})
    trial.results = {"step": STEP}
    job = DoctorJob(gpu=True, out=str(out))
    assert doctor.run(job, environ={}) == exit_codes.DONE
    before = out.read_bytes()
    ((key, value),) = other.items()
    was = trial.about[key]
    trial.about |= other | {"lacks": {"float8": ""}}
    with pytest.raises(UserError, match=re.escape(f"{key} {was!r} (here {value!r})")):
        doctor.run(job, environ={})
    assert out.read_bytes() == before


def test_the_page_does_not_replace_the_results(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="json"):
        doctor.run(DoctorJob(gpu=True, device="cpu", out=str(tmp_path / "gpu.html")), environ={})
    assert not list(tmp_path.iterdir())


def left_out(part: GpuPart) -> list[Any]:
    """What a step measured in this process has of both options without a setting; why its profile failed."""
    found: list[Any] = []

    def failing(run: Any, _: Any) -> Any:
        graph = Graph()
        x = graph.placeholder("x")
        total = graph.call_function(
            torch.ops.aten.add.Tensor, (x, graph.call_function(torch.ops.aten.mm.default, (x, x)))
        )
        graph.call_function(torch.ops.aten.var_mean.correction, (total,))
        KeepResiduals()(graph)
        found.append("recompute" in total.meta)
        found.append(isinstance(run._engine._zero, UpdateWithoutWaiting))
        raise RuntimeError("CUPTI is in use")

    with mock.patch.object(gpu_parts, "_account", failing):
        result = gpu_parts.step(part, one_world())
    return [*found, len(result["images_per_second"]), words_of({"part": {"kind": "step"}, "result": result})]


def test_what_has_no_setting_is_left_out() -> None:
    """And a step is measured although its profile failed."""
    usual = next(part for part in parts_of("cpu", num_gpus=0).values() if part.kind == "step")
    usual = replace(usual, compiled=False, seconds=0.01)
    with ProcessPoolExecutor(1, mp_context=forks()) as pool:
        for without, has in (((), True), ((KEPT_SUMS, LAUNCHED_UPDATES), False)):
            found = pool.submit(left_out, replace(usual, without=without)).result(120)
            assert found[:3] == [has, has, 5]
            assert found[3].endswith("; no profile: RuntimeError: CUPTI is in use")


def test_the_page_copes_with_the_record_of_an_h200() -> None:
    """It is older than profiles."""
    found = measured(Path(__file__).parents[3] / "benchmarks" / "results" / "gpu_h200.json")
    text = gpu_page(found).decode()
    assert "435.4 images/s, MFU 44.2 %, micro-batch 256, attention cudnn" in text
    assert "no profile: this record has none" in text
    assert "Where the time of a step goes" not in text


@pytest.mark.parametrize("result", [7, {}, {"milliseconds": 3}, {"milliseconds": {"B/16": {"flash": []}}}])
def test_a_kept_result_that_cannot_be_shown_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, result: Any
) -> None:
    part = GpuPart(kind="attention", device="cpu", seconds=0.1, shapes=SHAPES)
    monkeypatch.setattr(gpu_trial, "parts_of", lambda *_, **__: {"attention": part})
    out = tmp_path / "gpu.json"
    about = gpu_parts.device_facts("cpu")
    entry = {"part": gpu_trial._plain(part), "seconds": 1.0, "result": result}
    out.write_text(json.dumps({"about": about, "parts": {"attention": entry}}))
    again = {"part": {}, "seconds": 1.0, "failed": "measured again"}
    monkeypatch.setattr(gpu_trial, "_measured", lambda *_, **__: again)
    assert doctor.run(DoctorJob(gpu=True, device="cpu", out=str(out)), environ={}) == exit_codes.FAULTS_FOUND
    assert measured(out)["parts"] == {"attention": again | {"source": gpu_parts.source_digest()}}


def test_a_part_that_hangs_is_given_up_with_all_that_it_started() -> None:
    process = subprocess.Popen(
        ["sh", "-c", "sleep 600 & echo $!; wait"], stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None
    child = int(process.stdout.readline())
    assert gpu_trial._ended([process], 0.05) is None
    until(lambda: not Path(f"/proc/{child}").exists(), why="its child has not ended")


@pytest.mark.parametrize(("gigabytes", "micro_batch"), [(150.1, 256), (85.0, 128), (24.0, 16)])
def test_a_step_takes_the_largest_micro_batch_that_a_gpu_fits(
    monkeypatch: pytest.MonkeyPatch, gigabytes: float, micro_batch: int
) -> None:
    gpu = SimpleNamespace(total_memory=int(gigabytes * 1e9))
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: gpu)
    place = replace(world.current_world("cpu"), device=torch.device("cuda"))
    part = parts_of("cuda", num_gpus=1)["step vit_h14 eager"]
    assert gpu_parts._job(part, place).global_batch == micro_batch


@pytest.mark.parametrize(
    ("name", "planned"),
    [
        pytest.param("step vit_h14 compiled", 435.4, id="as an H200 was measured"),
        pytest.param("step vit_h14 eager", 379.6, id="eager"),
        pytest.param("step vit_h14 compiled, flash", 435.4, id="as with the kernel that was measured"),
    ],
)
def test_a_step_is_shown_beside_what_plan_says(monkeypatch: pytest.MonkeyPatch, name: str, planned: float) -> None:
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: "NVIDIA H200")
    place = replace(world.current_world("cpu"), device=torch.device("cuda"))
    part = replace(parts_of("cuda", num_gpus=1)[name], batch=256)
    found = gpu_parts._beside_plan(part, part.job(precision="bf16"), 400.0, place)
    assert found == {"mfu": 0.406, "planned_images_per_second": pytest.approx(planned, abs=0.1)}


def test_steps_in_float8_are_measured_where_a_gpu_has_it() -> None:
    parts = parts_of("cuda", num_gpus=1, has=["float8"])
    more = parts.keys() - parts_of("cuda", num_gpus=1).keys()
    assert more == {f"step vit_h14 compiled, {scaling} float8" for scaling in ("tensorwise", "rowwise")}
    for name in more:
        engine = gpu_parts._job(replace(parts[name], batch=8), world.current_world("cpu")).engine
        assert name.endswith(f"{engine.float8} float8")
        assert engine.precision == "bf16"


def test_steps_with_fused_mlps_are_measured_where_a_gpu_has_them() -> None:
    parts = parts_of("cuda", num_gpus=1, has=["fused MLPs"])
    more = parts.keys() - parts_of("cuda", num_gpus=1).keys()
    assert more == {"step vit_h14 compiled, fused MLP", "step vit_h14 compiled, tuned, fused MLP"}
    assert {parts[name].job(precision="bf16").engine.fused_mlp for name in more} == {True}


def test_selective_recomputation_is_measured_at_its_own_largest_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = parts_of("cuda", num_gpus=1)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: SimpleNamespace(total_memory=int(85e9)))
    place = replace(world.current_world("cpu"), device=torch.device("cuda"))
    found = {
        (part.image_size, job.engine.activation_checkpointing): job.global_batch
        for name in ("step vit_h14 compiled", "step vit_h14 at 518 px compiled")
        for part in (parts[name], parts[f"{name}, selective"])
        for job in (gpu_parts._job(part, place),)
    }
    assert found == {(224, "off"): 128, (224, "selective"): 256, (518, "off"): 32, (518, "selective"): 32}


def test_kernels_of_attention_are_measured_where_their_packages_are() -> None:
    without = parts_of("cuda", num_gpus=1)
    for name in ("flash3", "cudnn_packed"):
        parts = parts_of("cuda", num_gpus=1, has=[name])
        (more,) = parts.keys() - without.keys()
        assert (more, parts[more].settings) == (f"step vit_h14 compiled, {name}", {"engine.attention": name})
    tokens = without["step vit_h14 compiled, 256 tokens"].job(precision="bf16").model
    height, width = tokens.grid
    assert tokens.num_prefix_tokens + height * width == 256


def test_ranks_of_64_to_256_gpus_are_measured_early() -> None:
    """Those of ViT-H/14 at a global batch of 4096."""
    parts = parts_of("cuda", num_gpus=1)
    ranks = [(name, part) for name, part in list(parts.items())[:8] if part.kind == "rank"]
    for (name, part), num_gpus in zip(ranks, (64, 128, 256), strict=True):
        assert name == f"rank vit_h14 of {4096 // num_gpus} images compiled"
        assert (part.batch, part.compiled) == (4096 // num_gpus, True)


def test_the_step_of_one_rank_of_many_is_measured_with_its_exchanges() -> None:
    """On a CPU the host launches a step in the time that it takes, and never waits for a device."""
    (part,) = (part for part in parts_of("cpu", num_gpus=0).values() if part.kind == "rank")
    with ProcessPoolExecutor(1, mp_context=forks()) as pool:
        found = pool.submit(gpu_parts.rank, replace(part, compiled=False, seconds=0.01), one_world()).result(120)
    assert (found["backend"], found["micro_batch"], found["mfu"]) == ("gloo", 2, None)
    assert min(found["images_per_second"]) > 0
    time = found["time"]
    assert time["num_waits"] == 0
    assert time["num_kernels"] > 12 * 10  # ten and more in each of twelve blocks
    assert sum(time["classes"].values()) == pytest.approx(time["step_milliseconds"], abs=0.01)
    assert min(time["classes"][kind] for kind in ("products", "attention", "ours", "update", "exchange", "idle")) > 0
    assert time["classes"]["other"] < 0.01 * time["step_milliseconds"], time["kernels"]
    assert {each["phase"] for each in time["kernels"]} >= {"forward", "backward", "update"}
    assert min(found[f"{name}_milliseconds"] for name in ("host", "update")) > 0
    said = words_of({"part": {"kind": "rank"}, "result": json.loads(json.dumps(found))})
    assert f", launched in {number(found['host_milliseconds'])} ms, " in said
    assert said.endswith(f"{time['num_kernels']:,} kernels, 0 waits, through gloo")
    assert f" measured) = {number(time['classes']['products'])} products + " in said


@pytest.mark.long
def test_all_gpus_of_a_machine_are_measured_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here on two ranks through gloo, which may not overlap."""
    name, part = next((name, part) for name, part in parts_of("cpu", num_gpus=2).items() if part.kind == "together")
    asked = parts_of("cuda", num_gpus=2)[f"{name.replace('vit_ti16', 'vit_h14')}, overlap"]
    assert (asked.ranks, dict(asked.settings)) == (2, {"engine.overlap": "on"})
    part = replace(part, compiled=False, repeats=1)
    monkeypatch.setattr(gpu_trial, "parts_of", lambda *_, **__: {name: part})
    out = tmp_path / "gpu.json"
    assert doctor.run(DoctorJob(gpu=True, device="cpu", out=str(out)), environ={}) == exit_codes.DONE
    entry = measured(out)["parts"][name]
    assert (entry["result"]["ranks"], entry["result"]["backend"]) == (2, "gloo")
    assert (entry["result"]["micro_batch"], entry["result"]["attention"]) == (4, "flash")
    assert min(entry["result"]["images_per_second"]) > 0
    assert words_of(entry).endswith(" images/s of 2 ranks through gloo")


@pytest.mark.parametrize(
    "settings",
    [
        {"engine.no_such": 1},
        {"no_such.attention": 1},
        {"attention": "flash"},  # without its group
        {"engine.attention": "fast"},  # no kernel has this name
        {"engine.zero_stage": 4},
    ],
)
def test_a_part_refuses_settings_that_no_run_has(settings: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        GpuPart(kind="step", device="cpu", settings=settings)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_every_part_has_a_job_that_may_run(device: Literal["cuda", "cpu"]) -> None:
    """And each option is compared with a part that differs from it in this option alone."""
    parts = parts_of(device, num_gpus=2, has=["float8", "fused MLPs", "flash3", "cudnn_packed"])
    for name, part in parts.items():
        job = part.job(precision="bf16") if part.model else None
        assert job is None or job.clip_norm == 1.0, name  # as in the recipes
        assert part.expected_seconds > 0, name
        if part.question:
            beside = parts[part.question.beside]
            assert (beside.model, beside.batch, beside.compiled) == (part.model, part.batch, part.compiled), name
            assert len(part.settings.items() - beside.settings.items()) + len(part.without) == 1, name
            kernels = [each.settings.get("engine.attention") for each in (part, beside)]
            assert part.question.is_attention == (kernels[0] != kernels[1]), name
            assert part.question.settles.endswith("."), name
            assert part.question.expects, name


def test_the_first_ten_minutes_are_the_first_parts() -> None:
    parts = parts_of("cuda", num_gpus=1, has=["float8", "fused MLPs", "flash3", "cudnn_packed"])
    names = list(parts)[: list(parts).index("resume") + 1]
    assert sum(parts[name].expected_seconds for name in names) <= 600
    kinds = [parts[name].kind for name in names]
    assert kinds[:2] == ["attention", "step"]
    assert {"rank", "determinism"} < set(kinds)
    assert any("engine.float8" in parts[name].settings for name in names)


@pytest.mark.long
def test_a_step_in_float8_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, which emulates it."""
    small: dict[str, Any] = {"model": "vit_ti16", "image_size": 32, "batch": 3, "seconds": 0.1}
    part = GpuPart(kind="step", device="cpu", settings={"engine.float8": "tensorwise"}, **small)
    monkeypatch.setattr(gpu_trial, "parts_of", lambda *_, **__: {"float8": part})
    out = tmp_path / "gpu.json"
    assert doctor.run(DoctorJob(gpu=True, device="cpu", out=str(out)), environ={}) == exit_codes.DONE
    assert measured(out)["parts"]["float8"]["result"]["micro_batch"] == 3
    assert b"No steps with float8: a CPU gains nothing from float8." in out.with_suffix(".html").read_bytes()


def test_rounds_last_as_long_as_they_should_although_the_first_calls_take_no_time() -> None:
    calls = count()
    rates = gpu_parts._rates(lambda: time.sleep(0.01 * (next(calls) > 3)), 1, 0.5, world.current_world("cpu"))
    assert all(rate < 101 for rate in rates)
    assert next(calls) < 200  # about 100; thousands, if the first call told how many a round has


def test_without_a_gpu_nothing_is_measured(tmp_path: Path) -> None:
    with pytest.raises(UserError):
        doctor.run(DoctorJob(gpu=True, out=str(tmp_path / "gpu.json")), environ={})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["", "[]", '{"parts": 7, "about": {}}', '{"parts": {"a": 1}, "about": {}}', "{"])
def test_a_file_of_something_else_stays(tmp_path: Path, text: str) -> None:
    out = tmp_path / "notes.json"
    out.write_text(text)
    with pytest.raises(UserError):
        doctor.run(DoctorJob(gpu=True, device="cpu", out=str(out)), environ={})
    assert out.read_text() == text


TIME: dict[str, Any] = {
    "step_milliseconds": 588.0,
    "classes": {
        "products": 343.0,
        "attention": 70.2,
        "ours": 118.0,
        "update": 20.0,
        "copies": 0.0,
        "other": 1.8,
        "exchange": 0.0,
        "idle": 35.0,
    },
    "num_kernels": 2345,
    "num_waits": 3,
    "kernels": [
        {"name": "nvjet_tst_256x128", "class": "products", "phase": "forward", "milliseconds": 343.0, "count": 128.0},
        {
            "name": "triton_per_fused_add_7",
            "class": "ours",
            "phase": "backward",
            "milliseconds": 118.0,
            "count": 32.0,
            "gigabytes_per_second": 3987.0,
        },
        {"name": "<b>unknown</b>", "class": "other", "phase": "forward", "milliseconds": 0.001, "count": 1.0},
        {"name": "tiny_elementwise", "class": "ours", "phase": "forward", "milliseconds": 0.001, "count": 1.0},
    ],
    "idle": [{"place": "between steps", "milliseconds": 30.0, "host_late_milliseconds": 29.0, "count": 1.0}],
    "gaps": [{"milliseconds": 30.0, "place": "between steps", "is_host_late": True, "before": "adam", "after": "copy"}],
}
CLASSES_OF_64 = dict.fromkeys(TIME["classes"], 0.0) | {"products": 140.0, "other": 8.0, "idle": 15.0}
STEP = {
    "time": TIME,
    "images_per_second": [2900.0] * 5,
    "planned_images_per_second": 2622.0,
    "mfu": 0.31,
    "allocated_bytes": 41_000_000_000,
    "predicted_bytes": 44_000_000_000,
    "attention": "cudnn",
    "micro_batch": 128,
    "first_step_seconds": 30.0,
}


RANK = STEP | {
    "images_per_second": [400.0] * 5,
    "micro_batch": 64,
    "backend": "nccl",
    "host_milliseconds": 38.3,
    "update_milliseconds": 6.4,
    "time": TIME | {"step_milliseconds": 163.0, "classes": CLASSES_OF_64},
}


def results(name: str = "NVIDIA H100 80GB HBM3") -> dict[str, Any]:
    """As of a GPU."""
    parts = {
        "step vit_b16 compiled": ({"kind": "step"}, STEP),
        "rank vit_h14 of 64 images compiled": ({"kind": "rank"}, RANK),
        "loader": (
            {"kind": "loader"},
            {"images_per_second": [8700.0], "threads": 16, "cpu_seconds_per_1000": 1.2, "photographs": "generated"},
        ),
        "attention": ({"kind": "attention"}, {"milliseconds": {"B/16": {"flash": 0.6, "cudnn": 0.5, "math": "no"}}}),
    }
    entries = {key: {"part": part, "seconds": 9.0, "result": result} for key, (part, result) in parts.items()}
    failed = {"part": {"kind": "zero"}, "seconds": 150.0, "failed": "no result within 2 min 30 s"}
    about = {"device": "cuda", "name": name, "num_gpus": 1, "cores": 16, "torch": "2.13.0", "cuda": "12.8"}
    return {"about": about, "parts": entries | {"profile": failed}}


def test_the_page_draws_what_was_measured_beside_the_plan() -> None:
    found = results()
    text = gpu_page(found).decode()
    for words in (
        ">2,900 (31 %)<",
        ">2,622<",
        ">41.0 GB<",
        ">44.0 GB<",
        "failed: no result within 2 min 30 s",
        '<td class="num best">0.5</td>',
        "prepares 3 images for each",
        '<td class="num">160</td><td class="num">400</td><td class="num">31.0 %</td>',
        '<td class="num">38.3</td><td class="num">6.4</td><td class="num">7.5 %</td><td class="num">2,345</td>',
        "588 ms profiled (44.14 measured) = 343 products + 70.2 attention + 118 ours + 20 update + 1.8 other + 35 idle",
        "; 99.7 % explained; the profiled step took 13.32 times as long as the measured one",
        "163 ms profiled (160 measured) = 140 products + 8 other + 15 idle; 95.1 % explained, less than 99 %; 160 ms a",
        '<td class="num">44.14</td><td class="num">588</td><td class="num">343</td>',
        '<td class="num">3,987</td>',
        "&lt;b&gt;unknown&lt;/b&gt;",  # however little time it takes
        "between steps, waiting for the host",
        "160 ms a step, launched in 38.3 ms, 6.4 ms for the update alone, device idle 7.5 %, 2,345 kernels, 3 waits",
    ):
        assert words in text, words
    assert "tiny_elementwise" not in text
    assert gpu_page(copy.deepcopy(found)) == text.encode()
    assert "<script>alert" not in gpu_page(results("<script>alert(1)</script>")).decode()


BY_FLASH, OF_64 = {"attention": "flash"}, {"micro_batch": 64}
NOT_SETTLED = "not settled, since rounds differ by too much"


@pytest.mark.parametrize(
    ("question", "part", "own", "says"),
    [
        ({}, {}, {"rate": 1060}, "+6.0 % (rounds: +6.0 % to +6.0 %; expected: much); keep"),
        (
            {},
            {},
            {"rate": 1049.6},
            "+4.96 % (rounds: +4.96 % to +4.96 %; expected: much); delete: it wins less than 5 %",
        ),
        ({}, {}, {"rate": 900}, "-10.0 % (rounds: -10.0 % to -10.0 %; expected: much); delete: it wins less than 5 %"),
        ({"is_kept_if_slow": True}, {}, {"rate": 900}, "-10.0 % (rounds: -10.0 % to -10.0 %; expected: much)"),
        ({}, {"without": ["kept sums"]}, {"rate": 800}, "+25.0 % (rounds: +25.0 % to +25.0 %; expected: much); keep"),
        ({}, {}, {"rate": 1060, "by": 0.02}, f"+6.0 % (rounds: +4.94 % to +7.1 %; expected: much); {NOT_SETTLED}"),
        ({}, {}, {"rate": 1000, "by": 0.2}, f"+0.0 % (rounds: -10.0 % to +10.0 %; expected: much); {NOT_SETTLED}"),
        ({}, {}, {"rate": 1200, "by": 0.2}, "+20.0 % (rounds: +8.0 % to +32.0 %; expected: much); keep"),
        ({}, {}, {"rate": 0}, "not settled, since a part failed"),
        (
            {},
            {},
            {"rate": 1060} | BY_FLASH,
            "not settled, since attention was by flash, and by cudnn without the option",
        ),
        (
            {"is_attention": True},
            {},
            {"rate": 1060} | BY_FLASH,
            "+6.0 % (rounds: +6.0 % to +6.0 %; expected: much); keep",
        ),
        ({}, {}, {"rate": 900} | OF_64, "not settled, since the micro-batch was 64, and 128 without the option"),
    ],
)
def test_an_option_is_kept_if_it_wins_5_percent(
    question: dict[str, Any], part: dict[str, Any], own: dict[str, Any], says: str
) -> None:
    """Where a part leaves out what a run always has, the other one has the option. `by`: the fastest round of both, as
    a share beyond the median; the second fastest is half of it."""

    def entry(rate: float, by: float = 0.0, **more: Any) -> dict[str, Any]:
        rates = [rate * (1 + part * by) for part in (1, -0.5, 0, 0.5, -1)]
        return {"result": STEP | {"images_per_second": rates} | more} if rate else {"failed": "no memory"}

    asked = {"question": asdict(replace(QUESTION, **question)), "without": [], **part}
    entries = {"step": entry(1000) | {"part": {}}, "graphs": entry(**own) | {"part": asked}}
    for each in (entries, {"graphs": entries["graphs"], "step": entries["step"]}):
        assert [verdict.words for verdict in verdicts(each)] == [f"CUDA graphs: {says}"]
    assert [verdict.is_lost for verdict in verdicts(entries)] == ["delete" in says]
    failed = entries | {"step": {"part": {}, "failed": "no memory"}}
    assert next(verdicts(failed)).words == "CUDA graphs: not settled, since a part failed"


@pytest.mark.long
@pytest.mark.timeout(900)
def test_every_part_runs_on_a_cpu(tmp_path: Path) -> None:
    words = ["patchline", "doctor", "--gpu", "--device", "cpu", "--out", str(tmp_path / "gpu.json")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, "all parts measured" in done.stdout) == (0, True), done.stdout + done.stderr
    parts = measured(tmp_path / "gpu.json")["parts"]
    of_stage = [entry["result"]["losses"] for entry in parts.values() if entry["part"]["kind"] == "zero"]
    assert of_stage[0] == of_stage[1] == pytest.approx(of_stage[2], rel=1e-5)
    assert [entry["result"]["same_bits"] for entry in parts.values() if entry["part"]["kind"] == "determinism"] == [
        True
    ]
