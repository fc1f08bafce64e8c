"""Runs of millions of steps are reported in bounded memory and time."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from pipeline.runs.summary_file import NAME
from tests.rigs.training import FinishedRuns

NUM_STEPS, NUM_LINES = 3_000_000, 10_000_000
SPIKE = 1_234_567


# The peak that wait4 tells includes that of the process which started this one.
PROGRAM = """
import re, sys
from pathlib import Path
from jobs.cli import main
code = main(sys.argv[2:])
Path(sys.argv[1]).write_text(re.search(r"VmHWM:\\s*([0-9]+) kB", Path("/proc/self/status").read_text())[1])
sys.exit(code)
"""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a command took: seconds of CPU time, the largest resident size in bytes, and what it printed."""

    seconds: float
    most_bytes: int
    output: str


def cost_of(folder: Path, *words: str) -> Cost:
    """Runs `patchline WORDS`, which must not fail, in a process of its own."""
    told = folder / "peak"
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, str(told), *words], stdout=subprocess.PIPE, text=True)
    assert process.stdout
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode in (0, 1), output
    return Cost(seconds=usage.ru_utime + usage.ru_stime, most_bytes=int(told.read_text()) << 10, output=output)


def write_long(path: Path, *, num_steps: int, num_lines: int) -> None:
    """Writes metrics of so many steps. The first ones are repeated until there are so many lines."""
    columns = {f"time/{name}": 0.25 for name in ("data_wait", "to_device", "forward_backward", "optimizer", "step")}
    columns |= {"learning_rate": 0.001, "grad_norm": 1.5, "images_per_second": 1000.5, "data/bytes": 2743842.0}
    rest = json.dumps(columns)[1:].encode() + b"\n"
    with path.open("wb") as file:
        for step in range(1, num_steps + 1):
            loss = 77.0 if step == SPIKE else 2.0 + step % 1000 / 1000
            file.write(b'{"step": %d, "loss": %r, "epoch": %r, ' % (step, loss, step / 45) + rest)
        again = b'{"step": 1, "loss": 2.001, ' + rest
        for _ in range(num_lines - num_steps):
            file.write(again)
        file.write(b'{"step": %d, "loss": 2.5, "test_accuracy": 0.75}\n' % (num_steps + 1))


@pytest.mark.long
def test_the_losses_of_three_million_steps_are_compared_in_little_memory(tmp_path: Path) -> None:
    write_long(tmp_path / "metrics.jsonl", num_steps=NUM_STEPS, num_lines=NUM_STEPS)
    program = f"""
import re
from pathlib import Path
from pipeline.runs.comparison import StoredRun, different_losses
run = StoredRun(run_dir=Path({str(tmp_path)!r}), store=None)
assert different_losses(run, run) == ({NUM_STEPS + 1}, [])
print(re.search(r"VmHWM:\\s*([0-9]+) kB", Path("/proc/self/status").read_text())[1])
"""
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, check=True)
    assert int(done.stdout) << 10 < 1 << 30


@pytest.mark.long
def test_ten_million_lines_take_little_memory_and_from_their_summary_little_time(
    finished_runs: FinishedRuns, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(finished_runs.get(1), run_dir)
    write_long(run_dir / "metrics.jsonl", num_steps=NUM_STEPS, num_lines=NUM_LINES)
    costs = {}
    for name, words in {
        "doctor": ["doctor", str(run_dir)],
        "status": ["status", str(run_dir)],
        "made": ["report", str(run_dir)],
        "report": ["report", str(run_dir)],
        "compare": ["compare", str(run_dir), "--out", str(tmp_path / "compare.html")],
    }.items():
        costs[name] = cost_of(tmp_path, *words)
        sys.stderr.write(f"{name}: {costs[name].seconds:.1f} CPU-s, {costs[name].most_bytes >> 20} MiB\n")
    assert (run_dir / NAME).stat().st_size < 20 << 20
    for name in ("made", "report", "compare"):
        assert costs[name].most_bytes <= 300 << 20, name
    for name in ("report", "compare"):
        assert costs[name].seconds <= 20, name
    for name in ("doctor", "status"):
        assert costs[name].seconds <= 2, name
    assert costs["made"].seconds <= 20 + 20e-6 * NUM_LINES
    assert costs["made"].output == costs["report"].output
    page = (run_dir / "report.html").read_text()
    assert f"at step {SPIKE:,}" in page
    assert "0.7500" in costs["compare"].output
