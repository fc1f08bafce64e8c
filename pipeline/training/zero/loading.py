"""What a run checks and avoids when it loads DeepSpeed: untested versions, and libraries that it never uses.

The engine and state.py read and overwrite DeepSpeed's flat partitions, which are no public interface. Another version
may lay them out differently and still train, on wrong numbers. So a run trusts only the tested versions, and one that
the job names.

DeepSpeed's autotuner imports MLflow if it is installed (0.7 s per rank), and torch's optimisers import torch._dynamo
(0.9 s) even if nothing is compiled. All ranks wait for such imports again after every fault.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

from pipeline.training.settings.job import EngineConfig
from shards.config_values import shown_value
from shards.errors import UserError

TESTED = ("0.19.8",)
_MARK = "__dynamo_disable"  # where torch/_compile.py keeps what it has made of a function


def deepspeed_version() -> str:
    """The installed version, without what a build of one's own adds to it (0.19.8+cu130: 0.19.8)."""
    return version("deepspeed").partition("+")[0]


def refuse_untested_deepspeed(config: EngineConfig, installed: str) -> None:
    """UserError unless this version is a tested one, or the one that the job allows by name."""
    if installed in TESTED or config.allow_deepspeed == installed:
        return
    todo = f"install {TESTED[-1]} (pip install deepspeed=={TESTED[-1]}), or accept this one"
    allowed = f"; engine.allow_deepspeed is {shown_value(config.allow_deepspeed)}" if config.allow_deepspeed else ""
    raise UserError(
        f"DeepSpeed {installed} is installed{allowed}; tested: {', '.join(TESTED)}. Another version may lay its states "
        f"out in another way: {todo} with --engine.allow-deepspeed {installed}, which also checks its gradients before "
        "the first step"
    )


@contextmanager
def without(name: str) -> Iterator[None]:
    """Imports inside find no module of this name, unless it is loaded already; later ones do."""
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]  # as the import system says that there is none
    try:
        yield
    finally:
        del sys.modules[name]


def leave_dynamo_out() -> None:
    """Saves time in a process that compiles nothing: the functions of optimisers that torch.compile is to leave alone
    are called as they are, without loading what would see to that. Does nothing once torch._dynamo is loaded."""
    if "torch._dynamo" in sys.modules:
        return
    import torch  # noqa: PLC0415 - doctor asks this file for versions, without torch

    for name in ("add_param_group", "state_dict", "load_state_dict", "zero_grad"):
        function: Any = getattr(getattr(torch.optim.Optimizer, name), "__wrapped__", None)
        if function is not None and not hasattr(function, _MARK):
            setattr(function, _MARK, function)
