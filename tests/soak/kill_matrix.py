"""Kills runs at random moments, for every ZeRO stage and optimiser: `python -m tests.soak.kill_matrix`, or `make soak`.

Two ranks with dropout, mixup and EMA save every other step in the background. At random moments all processes are
killed (SIGKILL), or one rank, or one rank's writer; the same command continues the run. At each moment the newest
committed checkpoint must verify, and at its end the run must have the losses and the weights of the unbroken run, bit
for bit. Writes tests/soak/results/kill_matrix.json.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from jobs.data import pack
from jobs.recipes.pack import digits
from tests.rigs.kill_points import COMBINATIONS, VICTIMS, KilledRun, unbroken, words_of

RESULT = Path(__file__).parent / "results" / "kill_matrix.json"
KILLS_A_RUN = 5


def campaign(num_kills: int, *, folder: Path, seed: int) -> dict[str, object]:
    """`num_kills` kills of each combination; what happened."""
    draw, began = random.Random(seed), time.monotonic()
    url = str(folder / "digits")
    pack.run(replace(digits(), out=url))
    found: list[dict[str, object]] = []
    for stage, optimizer in COMBINATIONS:
        home = folder / f"{optimizer}-{stage}"
        home.mkdir()
        expected = unbroken(url, home / "unbroken", stage, optimizer)
        kills: list[str] = []
        faults: list[str] = []
        for number in range(10 * num_kills):
            if len(kills) >= num_kills:
                break
            run_dir = home / f"run-{number}"
            killed = KilledRun(words=words_of(url, run_dir, stage, optimizer), run_dir=run_dir, draw=draw)
            for _ in range(min(KILLS_A_RUN, num_kills - len(kills))):
                killed.kill(VICTIMS[(len(kills) + len(killed.kills)) % len(VICTIMS)])
            killed.finish(expected)
            kills += killed.kills
            faults += killed.faults
        found.append({"zero_stage": stage, "optimizer": optimizer, "kills": kills, "faults": faults})
        sys.stderr.write(f"stage {stage}, {optimizer}: {len(kills)} kills, faults: {faults}\n")
    minutes = round((time.monotonic() - began) / 60, 1)
    all_right = all(not each["faults"] and len(each["kills"]) >= num_kills for each in found)  # type: ignore[arg-type]
    return {"all_right": all_right, "minutes": minutes, "each": found}


def main() -> int:
    """0 if every killed run equals the unbroken one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30, help="of each combination")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = campaign(options.kills, folder=Path(folder), seed=options.seed)
    command = f"python -m tests.soak.kill_matrix --kills {options.kills} --seed {options.seed}"
    RESULT.write_text(json.dumps({"command": command, **result}, indent=1) + "\n")
    return 0 if result["all_right"] else 1


if __name__ == "__main__":
    sys.exit(main())
