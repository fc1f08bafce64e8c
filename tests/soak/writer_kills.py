"""Kills a rank's checkpoint writer at every step of a save: `python -m tests.soak.writer_kills`, or `make soak`.

At every system call of a save into a folder (strace injects SIGKILL), and at every request of a save to Ceph's S3
gateway, before it has the request and after. After each kill the newest committed checkpoint must verify, and the next
save must succeed. Needs strace and Ceph. Writes tests/soak/results/writer_kills.json.
"""

import json
import os
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import boto3

from jobs.data import pack
from jobs.recipes.pack import digits
from tests.rigs.ceph import ceph_gateway
from tests.rigs.cutting_proxy import cutting_proxy
from tests.rigs.writer_kills import saving_run

RESULT = Path(__file__).parent / "results" / "writer_kills.json"
THREADS = {1: "rank file", 2: "commit"}


def at_every_call(url: str, folder: Path) -> dict[str, object]:
    """Kills at every system call; what happened."""
    log, missed = folder / "trace", []
    with saving_run(url, folder / "calls") as run:
        calls = [call for place in THREADS for call in run.calls(place, log)]
        for number, call in enumerate(calls, start=1):
            if not run.kill_at(call, log):
                missed.append(call)
            sys.stderr.write(f"{number} of {len(calls)}: {call}, faults: {run.faults}\n")
    kinds = Counter(f"{THREADS[place]}: {name}" for place, name, _ in run.killed)
    return {
        "kills": len(calls) - len(missed),
        "missed": missed,
        "faults": run.faults,
        "at": dict(sorted(kinds.items())),
    }


def at_every_request(url: str, folder: Path) -> dict[str, object]:
    """Kills at every request, lost and stored; what happened."""
    missed = []
    (folder / "server").mkdir()
    with ceph_gateway(folder / "server") as server:
        names = ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION")
        values = (server.endpoint, server.access_key, server.secret_key, "us-east-1")
        os.environ.update(zip(names, values, strict=True))
        boto3.session.Session().client("s3").create_bucket(Bucket="kills")
        with cutting_proxy(server.endpoint) as proxy:
            own = {"AWS_ENDPOINT_URL": proxy.endpoint}
            with saving_run(url, folder / "requests", "s3://kills/run", environ=own) as run:
                counted = run.requests(proxy)
                for number in range(1, counted + 1):
                    for is_stored in (False, True):
                        if not run.kill_at_request(proxy, number, is_stored=is_stored):
                            missed.append((number, is_stored))
                        sys.stderr.write(f"request {number} of {counted}, stored {is_stored}: {run.faults}\n")
                proxy.goes_on.set()
    kills = 2 * counted - len(missed)
    return {"requests": counted, "kills": kills, "missed": missed, "faults": run.faults}


def main() -> int:
    """0 if every step was a kill, and nothing was damaged by any."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pack.run(replace(digits(), out=str(folder / "digits")))
        found = {
            "system_calls": at_every_call(str(folder / "digits"), folder),
            "requests": at_every_request(str(folder / "digits"), folder),
        }
    all_right = not any(each["missed"] or each["faults"] for each in found.values())
    minutes = round((time.monotonic() - began) / 60, 1)
    result = {"command": "python -m tests.soak.writer_kills", "all_right": all_right, "minutes": minutes, **found}
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if all_right else 1


if __name__ == "__main__":
    sys.exit(main())
