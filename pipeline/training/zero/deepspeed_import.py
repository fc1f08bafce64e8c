"""Keeps out of a start what the libraries load and a run never uses: after a fault, ranks wait for it again.

DeepSpeed's autotuner imports MLflow if it is installed (0.7 s per rank), and torch's optimisers import torch._dynamo,
to be left alone by torch.compile (0.9 s), even if nothing is compiled.

Which versions of DeepSpeed a run trusts: those that the engine and zero_state.py were tested with, and one by name.

They read and overwrite DeepSpeed's flat partitions, which are no public interface: another version may lay them out in
another way and still train, on wrong numbers.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import torch

from pipeline.training.settings.job import EngineConfig
from shards.errors import UserError
from shards.schema.config_values import shown_value

TESTED = ("0.19.8",)


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


_MARK = "__dynamo_disable"  # where torch/_compile.py keeps what it has made of a function


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
    """For a process that compiles nothing: the functions of optimisers that torch.compile is to leave alone are called
    as they are, without loading what would see to that. Does nothing once torch._dynamo is loaded."""
    if "torch._dynamo" in sys.modules:
        return
    for name in ("add_param_group", "state_dict", "load_state_dict", "zero_grad"):
        function: Any = getattr(getattr(torch.optim.Optimizer, name), "__wrapped__", None)
        if function is not None and not hasattr(function, _MARK):
            setattr(function, _MARK, function)
