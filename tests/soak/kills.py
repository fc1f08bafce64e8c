"""Kills training runs again and again: `python -m tests.soak.kills --kills 100` (or `make soak`).

A run is killed (SIGKILL to both ranks) at random times, and started again each time by the same command, until it has
survived its number of kills and finished; then the next run begins. Every run must end with the losses of the unbroken
run. Writes tests/soak/results/kills.json: the times of the kills, the step each start resumed from, and the verdict.
"""

import argparse
import json
import random
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from jobs import pack
from jobs.recipes.pack import digits
from tests.rigs.kills import after_seconds, run_and_kill
from tests.rigs.training import losses, pretrain_words, resumed_steps, run

RESULT = Path(__file__).parent / "results" / "kills.json"
KILLS_A_RUN = 10
SHORTEST_SECONDS, LONGEST_SECONDS = 0.3, 2.0  # such a run takes about two seconds


def campaign(num_kills: int, *, folder: Path, seed: int) -> dict[str, object]:
    """Runs and kills until `num_kills` kills are done; returns what happened."""
    draw = random.Random(seed)
    url = str(folder / "digits")
    pack.run(replace(digits(), out=url))
    run(pretrain_words(url, folder / "unbroken"), num_ranks=2, log_dir=folder)
    expected = losses(folder / "unbroken")
    runs: list[dict[str, object]] = []
    done = 0
    while done < num_kills:
        run_dir = folder / f"run-{len(runs)}"
        words = pretrain_words(url, run_dir)
        moments: list[float] = []
        while len(moments) < min(KILLS_A_RUN, num_kills - done):
            seconds = draw.uniform(SHORTEST_SECONDS, LONGEST_SECONDS)
            if not run_and_kill(words, run_dir, moment=after_seconds(seconds), num_ranks=2, log_dir=folder):
                break  # it ended before the kill
            moments.append(round(seconds, 3))
        code = run(words, num_ranks=2, log_dir=folder)
        done += len(moments)
        equal = code == 0 and losses(run_dir) == expected
        runs.append({"killed_after_seconds": moments, "resumed_from": resumed_steps(run_dir), "equal": equal})
        sys.stderr.write(f"{done} kills, {len(runs)} runs, equal: {all(bool(r['equal']) for r in runs)}\n")
    return {"kills": done, "runs": len(runs), "all_equal": all(bool(r["equal"]) for r in runs), "each": runs}


def main() -> int:
    """0 if every killed run equals the unbroken one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = campaign(options.kills, folder=Path(folder), seed=options.seed)
    command = f"python -m tests.soak.kills --kills {options.kills} --seed {options.seed}"
    RESULT.write_text(json.dumps({"command": command, **result}, indent=1) + "\n")
    return 0 if result["all_equal"] else 1


if __name__ == "__main__":
    sys.exit(main())
