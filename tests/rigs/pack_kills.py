"""Kills packing again and again: processes forked from one that has imported the project, ended by SIGKILL."""

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from jobs.data.pack import PackJob, run
from shards.store import open_store

_BEGUN = "work/listing.json"
_POLL_SECONDS = 0.01


def killed_often(job: PackJob, outs: Callable[[int], str], *, num_kills: int, seed: int) -> tuple[list[str], int]:
    """Packs to outs(0), outs(1), ..., killing each command at a random moment and running it again until it is done.

    Continues until `num_kills` commands have died of SIGKILL. Every other one is let begin its work first, so that it
    dies in the middle of it however busy the machine is. Returns the URLs of the finished datasets, and how often a
    command died at work rather than before it.
    """
    draw, kills, in_work, finished = random.Random(seed), 0, 0, list[str]()
    for number in (0, 1):  # the first one also starts the fork server
        finished.append(outs(number))
        seconds = _unbroken_seconds(replace(job, out=finished[-1]))
    while kills < num_kills:
        out = outs(len(finished))
        while True:
            process = _started(replace(job, out=out))
            while kills % 2 and process.is_alive() and not open_store(out).exists(_BEGUN):
                process.join(_POLL_SECONDS)
            process.join(draw.uniform(0.0, seconds))
            process.kill()
            process.join()
            if process.exitcode == -signal.SIGKILL:
                kills += 1
                in_work += open_store(out).exists(_BEGUN)
            if process.exitcode == 0 or kills >= num_kills:
                break
            assert process.exitcode in (0, -signal.SIGKILL), process.exitcode
        assert run(replace(job, out=out)) == 0
        finished.append(out)
    return finished, in_work


def _unbroken_seconds(job: PackJob) -> float:
    began = time.monotonic()
    process = _started(job)
    process.join()
    assert process.exitcode == 0
    return time.monotonic() - began


def _started(job: PackJob) -> ForkServerProcess:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["jobs.data.pack", "boto3", "tests.rigs.pack_kills"])
    process = context.Process(target=_pack, args=(job, _storage_environment()))
    process.start()
    return process


def _storage_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("AWS_")}


def _pack(job: PackJob, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    os.dup2(os.open(Path(os.devnull), os.O_WRONLY), 2)
    raise SystemExit(run(job))
