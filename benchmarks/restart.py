"""The time from a fault to the next step, part by part: a rank is killed, and the run continues by itself.

Two ranks, one per node of a real Slurm on this machine (tests/rigs/slurm.py), run slurm/stage.sbatch. After a save,
rank 0 is killed with SIGKILL; the try after it, in the same allocation, is timed until its first step is launched. The
stamps are those that every run leaves: the files in RUN/submit, and the parts in RUN/starts.jsonl.

With torch.compile there are two arms: with the compiler's cache of the start before, as in a try on the same node, and
without it, as on a node that has never run this. Command (10 minutes on two cores; Slurm's programs on the PATH):

    python -m benchmarks.restart --rounds 3 --out benchmarks/results/restart.json
"""

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.measure import machine
from benchmarks.rounds import Report, Round, in_turn, say, summary, write
from pipeline.runs.starts import START_SPANS, read_start_times, read_starts
from tests.rigs.slurm import SlurmCluster, SlurmConfig

ROOT = Path(__file__).resolve().parents[1]
EAGER, KEPT, EMPTY = "not compiled", "compiled, cache kept", "compiled, cache empty"
ARMS = (EAGER, KEPT, EMPTY)
# What happens before the new process begins, and after it what the run has put on record of its start.
AROUND = ("noticed", "ranks_ended", "next_try", "process")
FIGURES: tuple[str, ...] = (*AROUND, *START_SPANS, "whole")
_STEPS, _SAVE, _SECONDS = 100_000, 20, 300.0
_RUN = (
    *("digits_smoke", f"--steps={_STEPS}", "--global-batch=32", "--schedule.warmup-steps=5", "--device=cpu"),
    *(f"--checkpoint.every-steps={_SAVE}", "--checkpoint.keep-newest=2"),
)


def main() -> None:
    """Measures all arms; prints and keeps the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()

    def keep(rounds: list[Round]) -> None:
        write(arguments.out, results(rounds, arguments.rounds))

    with tempfile.TemporaryDirectory(prefix="restart-") as name, SlurmCluster(SlurmConfig()) as cluster:
        folder = Path(name)
        patchline = str(Path(sys.executable).parent / "patchline")
        subprocess.run([patchline, "pack", "digits", "--out", folder / "digits"], check=True, capture_output=True)
        arm = partial(measured, cluster=cluster, folder=folder, patchline=patchline)
        rounds = in_turn(arguments.arms, arm, rounds=arguments.rounds, keep=keep)
    say(table(results(rounds, arguments.rounds)["arms"]))


def measured(arm: str, *, cluster: SlurmCluster, folder: Path, patchline: str) -> Report:
    """One run with one kill; seconds by part."""
    run_dir, cache = folder / f"run-{time.monotonic_ns()}", folder / "cache"
    shutil.rmtree(cache, ignore_errors=True)
    compiles = "off" if arm == EAGER else "on"
    words = (*_RUN, f"--engine.compile={compiles}", f"--data.url={folder / 'digits'}", f"--run-dir={run_dir}")
    job = cluster.sbatch(
        ROOT / "slurm" / "stage.sbatch",
        *("pretrain", *words),
        options=["--nodes=2", f"--output={run_dir}.out"],
        env={"PATCHLINE": patchline, "TORCHINDUCTOR_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"},
    )
    try:
        cluster.wait_for((run_dir / "ledger.jsonl").exists, deadline_seconds=_SECONDS)
        if arm == EMPTY:
            shutil.rmtree(cache)
        pid, killed = read_starts(run_dir)[0].process.pid, time.time()
        os.kill(pid, signal.SIGKILL)
        cluster.wait_for(lambda: len(read_start_times(run_dir)) == 2, deadline_seconds=_SECONDS)
        return parts_of(run_dir, job=job, killed=killed)
    finally:
        cluster.command("scancel", str(job))
        cluster.wait_for(lambda: cluster.squeue_state(job) not in ("RUNNING", "COMPLETING"), deadline_seconds=60)


def parts_of(run_dir: Path, *, job: int, killed: float) -> Report:
    """Seconds of each part after a kill at this Unix time. `noticed`: the shell of the killed rank has seen it;
    `ranks_ended`: so has that of the other; `next_try`: srun has ended, and the script has judged; `process`: srun has
    started rank 0 again."""
    exits = run_dir / "submit" / f"exits-{job}-0"
    ended = sorted(path.stat().st_mtime for path in Path(f"{exits}-0").glob("rank-*"))
    line = read_start_times(run_dir)[-1]
    parts: Mapping[str, float] = line["parts"]
    began = float(line["unix_time"]) - sum(parts.values())
    stamps = (ended[0], ended[-1], Path(f"{exits}-1", "started").stat().st_mtime, began)
    before = (killed, *stamps)
    around = {name: stamp - last for name, stamp, last in zip(AROUND, stamps, before, strict=False)}
    return {**around, **parts, "whole": float(line["unix_time"]) - killed}


def results(rounds: list[Round], num_rounds: int) -> dict[str, Any]:
    """The results as they are kept, in seconds."""
    arms = [arm for arm in ARMS if arm in rounds[0]]
    chosen = "" if len(arms) == len(ARMS) else f" --arms {shlex.join(arms)}"
    return {
        "command": f"python -m benchmarks.restart --rounds {num_rounds}{chosen} --out benchmarks/results/restart.json",
        "machine": machine(),
        "arms": summary(rounds, FIGURES),
        "rounds": rounds,
    }


def table(summaries: Mapping[str, Report]) -> str:
    """The parts as Markdown, with medians."""
    rows = [f"| | {' | '.join(summaries)} |", f"|---|{'---|' * len(summaries)}"]
    for figure in FIGURES:
        shown = [f"{arm[figure][1]:.2f}" if arm[figure] else "" for arm in summaries.values()]
        rows.append(f"| {figure} | {' | '.join(shown)} |")
    return "\n".join(rows)


if __name__ == "__main__":
    main()
