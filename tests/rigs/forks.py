"""The server of forks, of which a test run has one: it has loaded all that a stage needs, and a fork begins at once.

Loading it takes as long as ten steps of a tiny model do: torch, its compiler (which making an optimiser loads) and
DeepSpeed. Whoever forks first starts the server for all.
"""

import multiprocessing
from multiprocessing.context import ForkServerContext

_STAGES = ("pack", "verify", "pretrain", "finetune", "evaluate", "demo")
_SLOW = ("torch._dynamo", "torch.utils.tensorboard", "tests.rigs.cpu_deepspeed")
PRELOADED = ["jobs.cli", *(f"jobs.{stage}" for stage in _STAGES), *_SLOW, "tests.rigs.processes"]
# Two ranks, or two tests, share two cores; and OpenMP's threads that wait take a core from those that work.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def forks() -> ForkServerContext:
    """Whose processes come from that server."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context
