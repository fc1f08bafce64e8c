"""Kills packing again and again: every command is killed at a random moment and run again, and the bytes are compared.

python -m tests.soak.packing --kills 300 --out tests/soak/results/packing.json
"""

import argparse
import json
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

from jobs.data.pack import PackJob, run
from shards.output.progress import Progress
from shards.sources.kinds import FolderSource
from tests.rigs.datasets import file_hashes
from tests.rigs.images import class_folders
from tests.rigs.pack_kills import killed_often

KILLS_A_ROUND = 25


def main() -> int:
    """1 if any dataset differs from the unbroken one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    began, in_work, datasets, different = time.monotonic(), 0, 0, 0
    with tempfile.TemporaryDirectory() as folder, Progress("kills", arguments.kills, unit="kills") as progress:
        root = class_folders(Path(folder) / "images", num_classes=3, images_a_class=20)
        job = PackJob(source=FolderSource(root=str(root)), samples_per_shard=4, samples_per_block=2)
        run(replace(job, out=f"{folder}/unbroken"))
        expected = file_hashes(Path(folder) / "unbroken")
        for seed in range(-(-arguments.kills // KILLS_A_ROUND)):
            outs = partial(_out, folder, seed)
            finished, met = killed_often(job, outs, num_kills=KILLS_A_ROUND, seed=seed)
            in_work += met
            datasets += len(finished)
            different += sum(file_hashes(Path(out)) != expected for out in finished)
            progress.advance(KILLS_A_ROUND, note=f"{different} of {datasets} datasets differ")
    result = {
        "command": f"python -m tests.soak.packing {' '.join(sys.argv[1:])}",
        "kills": KILLS_A_ROUND * -(-arguments.kills // KILLS_A_ROUND),
        "kills_in_mid_work": in_work,
        "datasets": datasets,
        "datasets_that_differ": different,
        "minutes": round((time.monotonic() - began) / 60, 1),
    }
    sys.stdout.write(json.dumps(result, indent=1) + "\n")
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if different else 0


def _out(folder: str, seed: int, number: int) -> str:
    return f"{folder}/{seed}-{number}"


if __name__ == "__main__":
    sys.exit(main())
