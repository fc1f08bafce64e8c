"""Kills the loader again and again: a process that streams is killed at random moments and started again.

python -m tests.soak.loader --kills 200

Every start continues from the last position that an earlier one saved, reading from a folder and from an S3 server in
turn. After each kill nothing may be left behind, every start must return its first batch within a deadline, and all
batches together must equal those of an unbroken run. Writes tests/soak/results/loader.json.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import boto3

from tests.rigs.loader import DEADLINE_SECONDS, Streaming, records_until
from tests.rigs.loader_kills import copied, killed_often, packed
from tests.rigs.s3 import moto_server

RESULT = Path(__file__).parent / "results" / "loader.json"
_NAMES_OF_S3 = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION")


def main() -> int:
    """1 if anything was left behind or any batch differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, moto_server() as endpoint:
        os.environ.update({"AWS_ENDPOINT_URL": endpoint, **dict.fromkeys(_NAMES_OF_S3, "us-east-1")})
        boto3.session.Session().client("s3").create_bucket(Bucket="loader")
        url = packed(Path(folder) / "dataset")
        streams = [Streaming(url=url), Streaming(url=copied(url, "s3://loader/dataset"))]
        (Path(folder) / "processes").mkdir()
        done = killed_often(streams, num_kills=options.kills, seed=options.seed, folder=Path(folder) / "processes")
        is_equal = [done.by_step.get(step) for step in range(done.stop_step)] == records_until(
            streams[0], done.stop_step
        )
    result: dict[str, Any] = {
        "command": f"python -m tests.soak.loader --kills {options.kills} --seed {options.seed}",
        "kills": done.kills,
        "kills_before_a_batch": done.kills_before_a_batch,
        "left_behind": done.left_behind,
        "batches": done.stop_step,
        "batches_repeated": done.batches_repeated,
        "equal_to_unbroken": is_equal,
        "seconds_to_first_batch": {
            "median": round(statistics.median(done.first_batch_seconds), 1),
            "longest": round(max(done.first_batch_seconds), 1),
            "allowed": DEADLINE_SECONDS,
        },
        "minutes": round((time.monotonic() - began) / 60, 1),
    }
    sys.stdout.write(json.dumps(result, indent=1) + "\n")
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if is_equal and not done.left_behind else 1


if __name__ == "__main__":
    sys.exit(main())
