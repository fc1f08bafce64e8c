"""Compares the formula of goodput with the ledgers of real runs: `python -m tests.soak.goodput`.

Each run is killed (SIGKILL) at moments from an exponential distribution until it ends, and saves by the clock. From the
means of its start-ups, stalls, commits and intervals, and from how often it was killed, the formula computes a goodput;
the run's ledger has its own. Writes tests/soak/results/goodput.json, which tests/pipeline/planning/test_cluster_plan.py
reads.
"""

import argparse
import json
import random
import tempfile
import time
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from jobs.data import pack
from jobs.recipes.pack import digits
from pipeline.planning.cluster_plan import Regime, outcome
from pipeline.runs.starts import read_starts
from pipeline.runs.time import time_of
from pipeline.training.reporting.metrics import read_metrics
from shards.files.local_files import Line, read_lines
from tests.rigs.kills import after_seconds, run_and_kill
from tests.rigs.training import pretrain_words

RESULT = Path(__file__).parent / "results" / "goodput.json"
BUSY = ("compute", "data_wait", "checkpoint", "evaluation")


def one_run(url: str, run_dir: Path, *, mean_seconds: float, steps: int, draw: random.Random) -> dict[str, object]:
    """Trains and kills until the run has ended."""
    often = ("--checkpoint.every-steps", "0", "--checkpoint.every-seconds", "0.7", "--steps", str(steps))
    words = pretrain_words(url, run_dir, *often)
    begins: list[float] = []
    is_killed = True
    while is_killed:
        begins.append(time.time())
        moment = after_seconds(draw.expovariate(1 / mean_seconds))
        is_killed = run_and_kill(words, run_dir, moment=moment, num_ranks=1, log_dir=run_dir.parent)
    lines = read_lines(run_dir / "ledger.jsonl", is_usable=lambda _: True).objects
    end = lines[-1]["unix_time"]
    num_kills = len(begins) - 1
    regime = measured(run_dir, lines, begins, mean_to_failure=(end - begins[0]) / max(1, num_kills))
    found = time_of(lines, read_starts(run_dir), unix_end=end)
    trained = [found.parts[name] for name in ("compute", "data_wait")]
    return {
        "num_kills": num_kills,
        "work_seconds": round(sum(trained), 3),
        "of_ledger": round(sum(trained) / found.wall_seconds, 4),
        "of_formula": round(outcome(regime, work_seconds=sum(trained)).goodput, 4),
        "regime": {name: round(value, 4) for name, value in asdict(regime).items() if name != "limit"},
    }


def measured(run_dir: Path, lines: list[Line], begins: list[float], *, mean_to_failure: float) -> Regime:
    """Means of what interrupted the run, whose starts began at these times. A start-up lasts from the kill of the start
    before to the first step; of a start that saved nothing it is unknown."""
    saves = [line for line in read_metrics(run_dir) if "checkpoint/commit_seconds" in line]
    trained, startups = [], []
    nothing: Line = {"attempt": "", "seconds": dict.fromkeys(BUSY, 0.0)}
    for before, line in pairwise([nothing, *lines]):
        spent = {name: line["seconds"][name] - before["seconds"][name] for name in BUSY}
        if before["attempt"] == line["attempt"]:
            trained.append(spent["compute"] + spent["data_wait"])
        else:
            began = max(one for one in begins if one < line["unix_time"])
            startups.append(line["unix_time"] - began - sum(spent.values()))
    return Regime(
        interval=fmean(trained),
        stall=fmean(line["checkpoint/stall_seconds"] for line in saves),
        commit=fmean(line["checkpoint/commit_seconds"] for line in saves),
        mean_to_failure=mean_to_failure,
        startup=fmean(startups),
        down=0.0,
        queue=0.0,
    )


def main() -> None:
    """Trains the runs and writes the results after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--means", type=float, nargs="+", default=[4.0, 8.0, 16.0], help="seconds between two kills")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    words = f"{' '.join(map('{:g}'.format, arguments.means))} --steps {arguments.steps} --seed {arguments.seed}"
    found: dict[str, Any] = {"command": f"python -m tests.soak.goodput --means {words}"}
    draw, runs = random.Random(arguments.seed), []
    with tempfile.TemporaryDirectory() as folder:
        url = f"{folder}/digits"
        pack.run(replace(digits(), out=url))
        for number, mean in enumerate(arguments.means):
            run_dir = Path(folder) / f"run-{number}"
            runs.append(one_run(url, run_dir, mean_seconds=mean, steps=arguments.steps, draw=draw))
            found |= {"kills_every_seconds": arguments.means[: number + 1], "runs": runs}
            RESULT.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
