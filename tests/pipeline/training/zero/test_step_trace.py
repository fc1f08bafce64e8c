"""--profile: the trace is one that Chrome and Perfetto read, names steps and kernels, and changes no result."""

import gzip
import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from jobs import exit_codes
from pipeline.training.zero.step_times import StepTimes, StepTrace, unnamed
from tests.rigs.processes import patchline
from tests.rigs.training import STEPS, FinishedRuns, losses, pretrain_words, run

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
