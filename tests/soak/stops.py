"""Stops one of two ranks for a minute (SIGSTOP), and continues it: `python -m tests.soak.stops` (or `make soak`).

Each rank in turn is stopped in mid-run. The other one must wait, and the losses must be those of the unbroken run.
Writes tests/soak/results/stops.json.
"""

import argparse
import json
import signal
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

from jobs.data import pack
from jobs.recipes.pack import digits
from tests.rigs.kills import step_at_least, wait_until
from tests.rigs.training import losses, pretrain_words, run, start

RESULT = Path(__file__).parent / "results" / "stops.json"
NUM_RANKS = 2
STOPPED_AT_STEP = 5


def stopped(words: list[str], run_dir: Path, *, rank: int, seconds: float, folder: Path) -> dict[str, object]:
    """Runs to the end, with one rank stopped for a while."""
    ranks = start(words, num_ranks=NUM_RANKS, log_dir=folder)
    assert wait_until(ranks, step_at_least(STOPPED_AT_STEP), run_dir)
    ranks.processes[rank].send_signal(signal.SIGSTOP)
    began, before = time.monotonic(), len(losses(run_dir))
    threading.Event().wait(seconds)
    is_alive, steps = ranks.poll(), len(losses(run_dir)) - before
    ranks.processes[rank].send_signal(signal.SIGCONT)
    stopped_seconds = round(time.monotonic() - began, 1)
    return {
        "rank": rank,
        "stopped_seconds": stopped_seconds,
        "steps_meanwhile": steps,
        "alive_meanwhile": is_alive,
        "exit_code": ranks.wait(),
    }


def main() -> int:
    """0 if every run equals the unbroken one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    seconds = parser.parse_args().seconds
    runs = []
    with tempfile.TemporaryDirectory() as name:
        folder, url = Path(name), f"{name}/digits"
        pack.run(replace(digits(), out=url))
        run(pretrain_words(url, folder / "unbroken"), num_ranks=NUM_RANKS, log_dir=folder)
        for rank in range(NUM_RANKS):
            run_dir = folder / f"run-{rank}"
            facts = stopped(pretrain_words(url, run_dir), run_dir, rank=rank, seconds=seconds, folder=folder)
            runs.append(facts | {"equal": losses(run_dir) == losses(folder / "unbroken")})
    is_right = all(each["equal"] and each["exit_code"] == 0 for each in runs)
    result = {"command": f"python -m tests.soak.stops --seconds {seconds:g}", "all_equal": is_right, "each": runs}
    sys.stdout.write(json.dumps(result, indent=1) + "\n")
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
