"""The fork server, one per test run: it has loaded all that a stage needs, so that forks start at once.

Loading torch, its compiler (needed to create an optimiser) and DeepSpeed takes as long as ten steps of a tiny model.
The first test that forks starts the server for all.
"""

import multiprocessing
from multiprocessing.context import ForkServerContext

_STAGES = (
    *("jobs.data.pack", "jobs.data.verify", "jobs.train.pretrain"),
    *("jobs.models.evaluate", "jobs.train.demo"),
)
_SLOW = ("torch._dynamo", "torch.utils.tensorboard", "tests.rigs.cpu_deepspeed")
PRELOADED = ["jobs.cli", *_STAGES, *_SLOW, "tests.rigs.processes"]  # a name that does not exist is passed over
# Two ranks, or two tests, share two cores, and OpenMP's waiting threads would take a core from working threads.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def forks() -> ForkServerContext:
    """The context whose processes come from that server."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context
