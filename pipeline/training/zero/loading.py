"""Refuses untested versions of DeepSpeed, and keeps DeepSpeed from loading libraries that a run never uses.

The engine and state.py read and overwrite DeepSpeed's flat partitions, which are not a public interface. Another
version may lay them out differently, and would still train, but with wrong numbers. So a run accepts only the tested
versions, and a version that the job names.

DeepSpeed's autotuner imports MLflow if it is installed (0.7 s per rank), and torch's optimisers import torch._dynamo
(0.9 s) even if nothing is compiled. All ranks would wait for such imports at every start, also after a fault.
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
_MARK = "__dynamo_disable"  # the attribute in which torch/_compile.py keeps a function's wrapped form


def deepspeed_version() -> str:
    """Returns the installed version, without a local build's suffix (0.19.8 for 0.19.8+cu130)."""
    return version("deepspeed").partition("+")[0]


def refuse_untested_deepspeed(config: EngineConfig, installed: str) -> None:
    """Raises UserError unless this version is tested, or the job allows it by name."""
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
    """Makes imports inside the `with` block find no module of this name, unless it is already loaded. Later imports
    find it."""
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]  # None tells the import system that there is no such module
    try:
        yield
    finally:
        del sys.modules[name]


def leave_dynamo_out() -> None:
    """Saves time in a process that compiles nothing: makes torch call the optimisers' functions directly, without
    loading torch._dynamo to keep torch.compile away from them. Does nothing if torch._dynamo is already loaded."""
    if "torch._dynamo" in sys.modules:
        return
    import torch  # noqa: PLC0415 - doctor reads versions from this file, without torch

    for name in ("add_param_group", "state_dict", "load_state_dict", "zero_grad"):
        function: Any = getattr(getattr(torch.optim.Optimizer, name), "__wrapped__", None)
        if function is not None and not hasattr(function, _MARK):
            setattr(function, _MARK, function)
