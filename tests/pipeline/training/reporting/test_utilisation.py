"""What a step costs, as rank 0 reports it."""

import mmap
from dataclasses import replace

import pytest
import torch

from jobs.recipes.pretrain import digits_smoke
from pipeline.training.reporting.utilisation import Utilisation, memory, train_flops
from pipeline.training.zero.step_times import StepTimes
from tests.rigs.processes import one_world

BASE = digits_smoke()
JOB = replace(
    BASE, model=replace(BASE.model, num_classes=10), engine=replace(BASE.engine, precision="fp32"), global_batch=64
)


def test_values_of_a_line() -> None:
    times = StepTimes()
    utilisation = Utilisation(JOB, replace(one_world(), num_ranks=2), times)
    assert utilisation.values(0.5).keys() == {"perf/mfu_of_measured_peak", "memory/resident_bytes"}, "no step has ended"
    times.begins()
    times.begins()
    found = utilisation.values(0.5)
    assert found["perf/mfu_of_measured_peak"] == pytest.approx(
        train_flops(JOB) * 64 / (0.5 * 2 * utilisation.measured_peak)
    )
    assert found["time/step"] > 0


def test_a_known_nominal_peak_comes_first() -> None:
    utilisation = Utilisation(JOB, one_world(), StepTimes())
    utilisation.measured_peak = train_flops(JOB) * 64 / 0.8
    assert utilisation.words(1.0) == "80 % of peak"
    utilisation.nominal_peak = train_flops(JOB) * 64 / 0.4
    assert utilisation.words(1.0) == "MFU 40 %"
    assert utilisation.values(1.0)["perf/mfu"] == pytest.approx(0.4)


def test_resident_memory_grows_with_what_is_held() -> None:
    before = memory(torch.device("cpu"))["memory/resident_bytes"]
    with mmap.mmap(-1, 256 << 20) as held:  # new pages, whatever the allocator has left over
        held[:] = bytes(len(held))
        assert memory(torch.device("cpu"))["memory/resident_bytes"] - before > 0.9 * len(held)


def test_memory_of_a_gpu_is_the_most_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 3)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda _: 4)
    assert memory(torch.device("cuda")) == {"memory/allocated_peak_bytes": 3.0, "memory/reserved_peak_bytes": 4.0}


def test_precision_must_be_decided() -> None:
    undecided = replace(JOB, engine=replace(JOB.engine, precision="auto"))
    with pytest.raises(ValueError, match=r"engine\.precision is 'auto'"):
        Utilisation(undecided, one_world(), StepTimes())
