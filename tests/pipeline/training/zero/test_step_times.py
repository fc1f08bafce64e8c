"""Parts of a step are those that the marks say, they sum to the wall time, and nothing waits for a mark.

The trace of --profile is one that Chrome and Perfetto read. It names steps and kernels, and changes no result.
"""

import gzip
import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from jobs import exit_codes
from pipeline.ranks.world import World
from pipeline.training.reporting.metrics import read_metrics
from pipeline.training.zero import engine, step_times
from pipeline.training.zero.engine import _quiet_deepspeed, timed_exchanges
from pipeline.training.zero.step_times import (
    PARTS,
    CudaMark,
    CudaMarks,
    DeviceMark,
    HostMark,
    HostMarks,
    StepTimes,
    StepTrace,
    marks_of,
    unnamed,
)
from pipeline.training.zero.update import class_without_waiting
from tests.rigs.processes import patchline, run_ranks
from tests.rigs.training import STEPS, TINY, FinishedRuns, losses, pretrain_words, run

PAUSE = 0.5
CPU = torch.device("cpu")
# Of Chrome's Trace Event Format, what Perfetto shows (its docs/getting-started/other-formats.md): the fields that each
# kind of event needs. A file in which others occur opens, but without them.
SHOWN = {
    "X": ("name", "ts", "dur", "pid", "tid"),
    "i": ("name", "ts", "pid", "tid"),
    "C": ("name", "ts", "pid", "args"),
    "M": ("name", "pid", "args"),
    **dict.fromkeys("stf", ("name", "ts", "pid", "tid", "id", "cat")),
}
ROUNDING = 2e-3  # microseconds: times are written in nanoseconds


@dataclass
class LateMark:
    """A moment of a device that lags behind: `is_there` once the device has reached it."""

    device: "LateMarks"
    at: float

    def is_past(self) -> bool:
        return self.at <= self.device.reached

    def seconds_to(self, later: DeviceMark) -> float:
        assert isinstance(later, LateMark)
        assert later.is_past(), "it was read before the device reached it"
        return later.at - self.at


@dataclass
class LateMarks:
    """Marks at the times of `now`, which the device reaches when `reached` says so."""

    time: float = 0.0
    reached: float = 0.0
    num_made: int = 0
    freed: list[DeviceMark] = field(default_factory=list)

    def now(self) -> DeviceMark:
        self.num_made += 1
        return LateMark(self, self.time)

    def free(self, mark: DeviceMark) -> None:
        self.freed.append(mark)


def step_of(times: StepTimes, marks: LateMarks) -> None:
    """1 s of data, 2 of copies, 3 of passes, 2 more of copies and 4 of passes, 5 of the update, 6 of all else."""
    times.begins()
    for part, seconds in (
        ("data_wait", 1),
        ("to_device", 2),
        ("forward_backward", 3),
        ("to_device", 2),
        ("forward_backward", 4),
        ("optimizer", 5),
    ):
        with times.part(part):  # type: ignore[arg-type]
            marks.time += seconds
    marks.time += 6


def test_parts_of_a_step_are_read_once_the_device_is_there() -> None:
    marks = LateMarks()
    times = StepTimes(marks)
    for _ in range(3):
        step_of(times, marks)
    assert times.since_line() == {}, "the device is still at the start"
    marks.reached = 23.0
    found = times.since_line()
    assert {name: found[f"time/{name}"] for name in PARTS} == {
        "data_wait": 1.0,
        "to_device": 4.0,
        "forward_backward": 7.0,
        "communication": 0.0,
        "optimizer": 5.0,
        "checkpoint": 0.0,
        "evaluation": 0.0,
        "other": 6.0,
    }
    assert times.since_line() == {}, "one step has ended and was read"
    marks.reached = 100.0
    times.begins()
    assert times.since_line()["time/optimizer"] == 5.0
    assert len(marks.freed) == marks.num_made - 1, "only the mark of the step under way is kept"


def test_a_part_inside_another_ends_with_it() -> None:
    marks = LateMarks(reached=1e9)
    times = StepTimes(marks)
    times.begins()
    with times.part("evaluation"):
        marks.time += 1
        with times.part("checkpoint"):
            marks.time += 2
        marks.time += 4
    times.begins()
    found = times.since_line()
    assert (found["time/evaluation"], found["time/checkpoint"], found["time/other"]) == (5.0, 2.0, 0.0)


@pytest.mark.parametrize("is_alone", [False, True])
def test_exchanges_are_a_part_of_their_own_but_in_saves_and_evaluations(*, is_alone: bool) -> None:
    marks = LateMarks(reached=1e9)
    times = StepTimes(marks, is_alone=is_alone)
    for _ in range(2):
        times.begins()
        for part in ("forward_backward", "evaluation"):
            with times.part(part):
                marks.time += 1
                with times.exchanging():
                    marks.time += 2
    times.begins()
    found = times.since_line()
    assert found["time/evaluation"] == 3.0
    assert found["time/forward_backward"] == (3.0 if is_alone else 1.0)
    assert found.get("time/communication") == (None if is_alone else 2.0)
    assert marks.num_made == (11 if is_alone else 15), "a rank that is alone makes no mark for them"
    assert times.since_exchange()[0] == 0.0


def test_lines_and_exchanges_have_means_of_their_own() -> None:
    marks = LateMarks(reached=1e9)
    times = StepTimes(marks)
    assert times.since_exchange() == (0.0, 0.0, 0.0)
    for _ in range(3):
        step_of(times, marks)
        assert times.since_line() == {} or times.since_line() == {}
    step_of(times, marks)
    wait, own, stall = times.since_exchange()
    assert (wait, stall) == (1.0, 0.0)
    assert 0 < own < 60, "by the host's clock"
    assert times.since_exchange() == (0.0, 0.0, 0.0)


def times_of_exchanges(world: World) -> dict[str, float]:
    """Rank 1 comes late to two exchanges of DeepSpeed, one of which is waited for later, and to one outside."""
    comm, times = _quiet_deepspeed().comm, StepTimes()
    comm.barrier()
    times.begins()
    with timed_exchanges(times):
        for is_late in (False, True):
            threading.Event().wait(PAUSE * world.rank)
            work = comm.all_reduce(torch.ones(1), async_op=is_late)
            if is_late:
                work.wait()
    threading.Event().wait(PAUSE * world.rank)
    comm.all_reduce(torch.ones(1))
    times.begins()
    return times.since_line()


@pytest.mark.long
@pytest.mark.alone
def test_deepspeeds_exchanges_are_communication() -> None:
    waiting, _late = run_ranks(times_of_exchanges, num_ranks=2)
    assert waiting["time/communication"] > 1.1 * PAUSE, "it has waited twice inside"
    assert waiting["time/other"] > 0.1 * PAUSE, "and once outside"


@dataclass(eq=False)
class FakeStream:
    """A stream whose work so far is done at `until`. One stream waits for another as on a GPU."""

    gpu: "FakeGpu"
    until: float = 0.0

    def run(self, seconds: float) -> None:
        """Launches a kernel."""
        self.until = max(self.until, self.gpu.host) + seconds

    def wait_stream(self, other: "FakeStream") -> None:
        self.until = max(self.until, other.until)

    def synchronize(self) -> None:
        self.gpu.host = max(self.gpu.host, self.until)


class FakeEvent:
    """A moment of the stream on which it is recorded."""

    at = 0.0

    def __init__(self, **_: object) -> None:
        pass

    def record(self, stream: FakeStream) -> None:
        self.at = max(stream.until, stream.gpu.host)

    def query(self) -> bool:
        return True

    def elapsed_time(self, later: "FakeEvent") -> float:
        return 1000 * (later.at - self.at)


class FakeGpu:
    """Two streams and the host's clock, as torch.cuda and DeepSpeed's accelerator have them."""

    Event = FakeEvent

    def __init__(self) -> None:
        self.host = 0.0
        self.passes, self.sums = FakeStream(self), FakeStream(self)
        self._current = self.passes

    def current_stream(self, _: object = None) -> FakeStream:
        return self._current

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self._current = self._current, stream
        yield
        self._current = before

    def default_stream(self) -> FakeStream:
        return self.passes

    def resolves_data_dependency(self) -> bool:
        return False

    def synchronize(self) -> None:
        self.host = max(self.host, self.passes.until, self.sums.until)


def times_of_overlap(_world: World, stage: int, seconds_of_a_sum: float) -> tuple[dict[str, float], float, bool]:
    """The parts of a step of three buckets, each of 10 s of the backward pass, the rank's own part of it, and whether
    the host has waited in the step: by DeepSpeed's own code and ours, on two streams."""
    gpu, zero = FakeGpu(), _quiet_deepspeed().runtime.zero
    first, third = zero.stage_1_and_2, zero.stage3
    backend = SimpleNamespace(**dict.fromkeys(engine._EXCHANGES))
    backend.all_reduce = lambda: gpu.current_stream().run(seconds_of_a_sum)
    bf16 = torch.bfloat16
    of_first: Any = object.__new__(class_without_waiting(first.DeepSpeedZeroOptimizer))
    vars(of_first).update(
        _offload_gradient_safety_enabled=False,
        overlap_comm=True,
        reduction_stream=gpu.sums,
        ipg_buckets={bf16: first.IPGBucket(copy_streams={gpu.passes})},
        reduce_scatter=False,
        gradient_reduction_w_predivide=lambda *_: backend.all_reduce(),
        _record_gradient_stream=lambda *_: None,
        _add_full_reduction_to_compact_grad_partition=lambda *_: None,
        report_ipg_memory_usage=lambda *_: None,
        reduce_ipg_grads=lambda: None,
        params_already_reduced=[],
        contiguous_gradients=True,
        previous_reduced_grads={},
        cpu_offload=False,
        bit16_groups=[],
        _backward_hook_state=SimpleNamespace(),
    )
    of_third = SimpleNamespace(
        report_ipg_memory_usage=lambda *_: None,
        ipg_buckets={},
        reduce_and_partition_stream=gpu.sums,
        params_already_reduced={},
        offload_optimizer=True,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "cuda", gpu)
        for name in ("zero.stage_1_and_2.get_accelerator", "zero.stage3.get_accelerator"):
            patch.setattr(f"deepspeed.runtime.{name}", lambda: gpu)
        patch.setattr("deepspeed.accelerator.get_accelerator", lambda: gpu)
        patch.setattr("deepspeed.comm.comm.cdb", backend)
        patch.setattr(step_times, "time", SimpleNamespace(monotonic=lambda: gpu.host))
        times = StepTimes(CudaMarks(torch.device("cuda", 0)))
        with timed_exchanges(times):
            times.begins()
            with times.part("forward_backward"):
                for _ in range(3):
                    gpu.passes.run(10.0)
                    if stage == 3:
                        gpu.sums.wait_stream(gpu.passes)
                        with gpu.stream(gpu.sums):
                            backend.all_reduce()
                    else:
                        of_first.average_tensor(torch.ones(1), bf16)
                if stage == 3:
                    third.DeepSpeedZeroOptimizer_Stage3.independent_gradient_partition_epilogue(of_third)
                else:
                    of_first.independent_gradient_partition_epilogue()
            with times.part("optimizer"):
                gpu.passes.run(1.0)
            has_waited = gpu.host > 0
            gpu.synchronize()
            times.begins()
        return times.since_line(), times.since_exchange()[1], has_waited


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(
    ("seconds_of_a_sum", "waited"),
    [
        pytest.param(2.0, 2.0, id="hidden but for the last"),
        pytest.param(15.0, 25.0, id="a slow rank is waited for"),
    ],
)
def test_sums_beside_the_passes_are_communication_as_far_as_they_are_waited_for(
    stage: int, seconds_of_a_sum: float, waited: float
) -> None:
    """A mark on the stream of the sums would count those that are hidden, and alarms would name another rank than the
    slow one."""
    ((found, own, has_waited),) = run_ranks(times_of_overlap, stage, seconds_of_a_sum, num_ranks=1)
    assert stage == 3 or not has_waited
    assert found["time/communication"] == waited
    assert found["time/forward_backward"] == 30.0
    assert found["time/optimizer"] == 1.0
    assert found["time/step"] == 31.0 + waited
    assert own == 31.0, "by which slow ranks are found"


def test_an_error_inside_a_part_ends_the_part() -> None:
    marks = LateMarks(reached=1e9)
    times = StepTimes(marks)
    times.begins()
    with suppress(ValueError), times.part("data_wait"):
        marks.time += 1
        raise ValueError
    marks.time += 2
    times.begins()
    assert times.since_line()["time/other"] == 2.0


def test_a_new_loop_forgets_what_lies_before_it() -> None:
    marks = LateMarks(reached=1e9)
    times = StepTimes(marks)
    step_of(times, marks)
    times.forget()
    marks.time += 1000
    step_of(times, marks)
    times.begins()
    assert sum(seconds for name, seconds in times.since_line().items() if name != "time/step") == 23.0


def test_the_wall_time_comes_from_another_clock() -> None:
    marks = LateMarks(reached=1e9)
    times = StepTimes(marks)
    began = time.monotonic()
    step_of(times, marks)
    times.begins()
    assert times.since_line()["time/step"] <= time.monotonic() - began


def test_marks_of_a_cpu_are_times() -> None:
    marks = marks_of(torch.device("cpu"))
    assert isinstance(marks, HostMarks)
    first, second = marks.now(), marks.now()
    assert first.is_past()
    assert 0 < first.seconds_to(second) < 60
    with pytest.raises(TypeError, match="is no moment of the CPU"):
        HostMark(0.0).seconds_to(CudaMark(MagicMock()))


def test_marks_of_a_gpu_are_a_ring_of_events_that_nothing_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU is here: torch.cuda, recorded. What it would say is tested where there is one."""
    cuda = MagicMock()
    cuda.Event.side_effect = lambda **_: MagicMock(**{"elapsed_time.return_value": 1500.0, "query.return_value": True})
    monkeypatch.setattr(torch, "cuda", cuda)
    marks = marks_of(torch.device("cuda", 1))
    assert isinstance(marks, CudaMarks)
    times = StepTimes(marks)
    for _ in range(10):
        times.begins()
        with times.part("forward_backward"):
            pass
    assert times.since_line()["time/forward_backward"] == 1.5
    assert cuda.Event.call_count <= 6, "events are used again"
    cuda.Event.assert_called_with(enable_timing=True)
    cuda.synchronize.assert_not_called()
    with pytest.raises(TypeError, match="is no moment of a GPU"):
        marks.now().seconds_to(HostMark(0.0))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpus_parts_sum_to_its_wall_time() -> None:
    device = torch.device("cuda")
    times, large = StepTimes(marks_of(device)), torch.randn(4096, 4096, device=device)
    for _ in range(20):
        times.begins()
        with times.part("forward_backward"):
            for _ in range(20):
                large @ large
        with times.part("optimizer"):
            float(large[0, 0])
    torch.cuda.synchronize()
    found = times.since_line()
    assert sum(found[f"time/{part}"] for part in PARTS) == pytest.approx(found["time/step"], rel=0.03)


def test_parts_of_a_runs_steps_sum_to_their_wall_time(finished_runs: FinishedRuns) -> None:
    """A real run, on two ranks, with saves and marks in every part; all but the last step has a line of its own."""
    run_dir: Path = finished_runs.get(2)
    lines = [line for line in read_metrics(run_dir) if "time/step" in line]
    steps = TINY[TINY.index("--steps") + 1]
    assert len(lines) >= int(steps) // 2
    for line in lines:
        assert sum(line[f"time/{part}"] for part in PARTS) == pytest.approx(line["time/step"], rel=0.03), line
        measured = ("data_wait", "to_device", "forward_backward", "communication", "optimizer")
        assert min(line[f"time/{part}"] for part in measured) > 0
    for line in read_metrics(run_dir)[1:]:  # before the first, no step has ended
        assert 0 < line["ranks/own_step_median"] <= line["ranks/own_step"] < 60
        assert {line[f"ranks/{name}_rank"] for name in ("own_step", "data_wait", "checkpoint")} <= {0, 1}
    assert not [name for line in read_metrics(finished_runs.get(1)) for name in line if name.startswith("ranks/")]
    assert not any("time/communication" in line for line in read_metrics(finished_runs.get(1)))
    assert any(line["time/checkpoint"] > 0 for line in lines)
    assert sum(line["time/other"] for line in lines) < 0.5 * sum(line["time/step"] for line in lines)
    assert all(line["memory/resident_bytes"] > 1e8 for line in read_metrics(run_dir))
    assert not any(name.startswith("perf/mfu") for line in read_metrics(run_dir) for name in line), "a CPU has no peak"


def traced(path: Path) -> list[dict[str, Any]]:
    """The events of a trace, once they are what Perfetto reads."""
    found: list[dict[str, Any]] = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    for event in found:
        kind = event["ph"].replace("I", "i")
        assert kind in SHOWN, event
        assert set(SHOWN[kind]) <= event.keys(), event
        assert isinstance(event["name"], str), event
        assert all(type(event.get(name, 0)) in (int, float) and event.get(name, 0) >= 0 for name in ("ts", "dur")), (
            event
        )
    assert_nested([event for event in found if event["ph"] == "X"])
    return found


def assert_nested(events: list[dict[str, Any]]) -> None:
    """Events of one thread lie within each other or apart; Perfetto moves those that overlap elsewhere."""
    threads: dict[tuple[Any, Any], list[dict[str, Any]]] = {}
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        opened = threads.setdefault((event["pid"], event["tid"]), [])
        while opened and opened[-1]["ts"] + opened[-1]["dur"] <= event["ts"] + ROUNDING:
            opened.pop()
        if opened:
            end = opened[-1]["ts"] + opened[-1]["dur"]
            assert event["ts"] + event["dur"] <= end + ROUNDING, (opened[-1], event)
        opened.append(event)


def inside(event: dict[str, Any], outer: dict[str, Any]) -> bool:
    """Whether an event lies within another one, on the same thread."""
    begin, end = outer["ts"] - ROUNDING, outer["ts"] + outer["dur"] + ROUNDING
    is_same = (event["pid"], event["tid"]) == (outer["pid"], outer["tid"])
    return is_same and begin <= event["ts"] <= event["ts"] + event["dur"] <= end


def train(times: StepTimes, trace: StepTrace, steps: range) -> None:
    for step in steps:
        times.begins()
        trace.begins(step)
        with times.part("forward_backward"):
            torch.ones(8, 8).mm(torch.ones(8, 8))


def test_a_run_is_traced_and_ends_with_the_same_losses(
    digits_url: str, finished_runs: FinishedRuns, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """On two ranks: the words reach both, and rank 0 traces. The record does not have them."""
    run_dir, whole = tmp_path / "run", finished_runs.get(2)
    assert (
        run(pretrain_words(digits_url, run_dir, "--profile", "3:5"), num_ranks=2, log_dir=tmp_path) == exit_codes.DONE
    )
    assert losses(run_dir) == losses(whole)
    assert "profiler_" not in capfd.readouterr().err, "PyTorch's profiler writes nothing beside the live line"
    assert "profile" not in (run_dir / "job.yaml").read_text()
    (path,) = (run_dir / "profile").iterdir()
    assert path.name == "steps-3-5.json.gz"
    events = [event for event in traced(path) if event.get("ph") == "X"]
    names = Counter(event["name"] for event in events)
    assert [names[f"step {number}"] for number in (2, 3, 4, 5, 6)] == [0, 1, 1, 1, 0]
    assert names["aten::addmm"] >= 3 * 2 * 4, "each product of each block"
    assert min(names[part] for part in ("data_wait", "to_device", "forward_backward", "optimizer")) == 3
    for number in (3, 4, 5):
        (step,) = [event for event in events if event["name"] == f"step {number}"]
        (part,) = [event for event in events if event["name"] == "forward_backward" and inside(event, step)]
        assert sum(event["name"] == "aten::addmm" and inside(event, part) for event in events) >= 2 * 4
    steps = [event for event in events if event["name"].startswith("step ")]
    named = {event["pid"]: event["args"]["name"] for event in traced(path) if event["name"] == "process_name"}
    assert all(named.get(event["pid"]) for event in steps), "Perfetto names the process"
    threads = {(event["pid"], event["tid"]) for event in traced(path) if event["name"] == "thread_name"}
    assert all((event["pid"], event["tid"]) in threads for event in steps), "and the thread"


def test_only_its_steps_are_traced_and_only_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    times = StepTimes()
    trace = StepTrace(tmp_path, range(2, 4), times, device=CPU)
    with caplog.at_level(logging.INFO):
        train(times, trace, range(1, 5))
        assert times.named is unnamed, "names cost nothing after it"
        train(times, trace, range(2, 5))  # after a rewind
        trace.close()
    assert [path.name for path in (tmp_path / "profile").iterdir()] == ["steps-2-3.json.gz"]
    assert [record.getMessage() for record in caplog.records] == [
        f"steps 2 to 3 are traced: open {tmp_path / 'profile' / 'steps-2-3.json.gz'} in https://ui.perfetto.dev"
    ]


def test_what_is_traced_when_the_run_ends_is_written(tmp_path: Path) -> None:
    times = StepTimes()
    trace = StepTrace(tmp_path, range(2, 50), times, device=CPU)
    train(times, trace, range(1, 4))
    trace.close()
    events = traced(tmp_path / "profile" / "steps-2-3.json.gz")
    assert {"step 2", "step 3", "aten::mm"} <= {event["name"] for event in events}


def test_steps_that_were_not_trained_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    times = StepTimes()
    trace = StepTrace(tmp_path, range(2, 4), times, device=CPU)
    train(times, trace, range(10, 12))
    trace.close()
    assert "--profile 2:3: none of these steps was trained, so there is no trace" in caplog.text
    assert not (tmp_path / "profile").exists()


def test_steps_that_no_run_trains_any_more_are_told(finished_runs: FinishedRuns, digits_url: str) -> None:
    """After the last step it is a mistake, known before the run; before it, the run may be done."""
    words = pretrain_words(digits_url, finished_runs.get(1), "--profile")
    late, done = patchline(*words, f"{STEPS + 1}:{STEPS + 2}"), patchline(*words, "2:3")
    assert late.code == exit_codes.USER_MISTAKE
    assert f"--profile is {STEPS + 1}:{STEPS + 2}, and the last step of the run is {STEPS}" in late.errors
    assert done.code == exit_codes.DONE
    assert "--profile 2:3: none of these steps was trained, so there is no trace" in done.errors


def test_a_trace_that_cannot_be_written_ends_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "profile").write_text("a file is in the way")
    times = StepTimes()
    trace = StepTrace(tmp_path, range(1, 2), times, device=CPU)
    train(times, trace, range(1, 4))
    assert "the trace of steps 1 to 1 could not be written to" in caplog.text
