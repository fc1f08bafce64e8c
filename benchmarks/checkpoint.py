"""What a checkpoint costs training: ours, DeepSpeed's and PyTorch's, of one state, in one run.

A state of 302 million parameters (ViT-L/16 for images of 32 px, so that a step is short) is trained by ZeRO-1 with
AdamW in fp32 on ranks of one thread each. In every round each arm saves it once; the numbers are of the slowest rank:

    memcpy             the rank's masters and moments, copied into memory that is there already
    patchline          how long training waits for an asynchronous save, and when its checkpoint is committed
    patchline, sync    --checkpoint.asynchronous off
    deepspeed          save_checkpoint
    dcp                torch.distributed.checkpoint: save, and async_save (until it returns, and until it is done)

`steps`: 20 training steps with an asynchronous save in the second of them, and 20 without, in turns, so that the
writers' own work is counted too: two ranks leave two cores no time for it, `--ranks 1` leaves it a core. Steps vary by
more than a save takes, so the kernel is asked as well how long the training thread was ready to run but had no core,
and how much CPU time the writer took. Command (20 minutes, 24 GB of memory, 12 GB of disk):

    python -m benchmarks.checkpoint --out benchmarks/results/checkpoint.json
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.measure import machine
from benchmarks.rounds import Aim, aims_table, say, write
from pipeline.ranks.host import free_port

MOST_MEMCPYS, MOST_SHARE = 1.3, 0.05
MOST_SECONDS = 1800.0


def main() -> None:
    """Measures all arms; prints and keeps the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pairs", type=int, default=3, help="of 20 steps with a save and 20 without")
    parser.add_argument("--model", default="vit_l16")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--work", type=Path, help="folder for what the arms write (default: a temporary one)")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.work) as folder:
        found = measured(Path(folder), arguments)
    command = f"python -m benchmarks.checkpoint --rounds {arguments.rounds} --pairs {arguments.pairs}"
    command += f" --model {arguments.model} --ranks {arguments.ranks}" + (
        f" --out {arguments.out}" if arguments.out else ""
    )
    aims = [aim.row() for aim in aims_of(found)]
    write(arguments.out, {"command": command, "machine": machine(), **found, "aims": aims})
    sys.stdout.write(f"\n{table(found)}\n{aims_table(aims)}")


def measured(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Rank 0's report. SystemExit if a rank fails."""
    environ = {**os.environ, "WORLD_SIZE": str(arguments.ranks), "LOCAL_WORLD_SIZE": str(arguments.ranks)}
    environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    options = ["--rounds", str(arguments.rounds), "--pairs", str(arguments.pairs), "--model", arguments.model]
    command = [sys.executable, "-m", "benchmarks.checkpoint_arms", "--folder", str(folder), *options]
    ranks = [
        subprocess.Popen(command, env={**environ, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(arguments.ranks)
    ]
    try:
        codes = [rank.wait(MOST_SECONDS) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    if any(codes):
        raise SystemExit(f"the ranks ended with {codes}")
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return report


def aims_of(found: dict[str, Any]) -> list[Aim]:
    """What a save may cost."""
    seconds, steps = found["seconds"], found["steps"]
    stalls = [ours / copy for ours, copy in zip(seconds["patchline"], seconds["memcpy"], strict=True)]
    sync = statistics.median(seconds["patchline, sync"])
    shares = [_more(pair, "seconds") / sync for pair in steps]
    lost = [_more(pair, "without_core") / sync for pair in steps]
    return [
        Aim(what="stall of a save / one memcpy", limit=MOST_MEMCPYS, found=stalls),
        Aim(what="(20 steps with a save - 20 without) / a synchronous save", limit=MOST_SHARE, found=shares),
        Aim(what="the same of the time in which the trainer had no core", limit=MOST_SHARE, found=lost),
    ]


def _more(pair: dict[str, Any], what: str) -> float:
    return float(pair["with"][what] - pair["without"][what])


def table(found: dict[str, Any]) -> str:
    """A row for each arm: median seconds, their range, and the multiple of one memcpy."""
    copy = statistics.median(found["seconds"]["memcpy"])
    lines = ["| | seconds | range | memcpys |", "|---|---|---|---|"]
    for name, seconds in found["seconds"].items():
        middle = statistics.median(seconds)
        lines.append(f"| {name} | {middle:.2f} | {min(seconds):.2f} to {max(seconds):.2f} | {middle / copy:.1f} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    say("ranks train and save; this takes minutes")
    main()
