"""Keeps out of a start what the libraries load and a run never uses: after a fault, ranks wait for it again.

DeepSpeed's autotuner imports MLflow if it is installed (0.7 s per rank), and torch's optimisers import torch._dynamo,
to be left alone by torch.compile (0.9 s), even if nothing is compiled.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

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
    """Saves time in a process that compiles nothing: the functions of optimisers that torch.compile is to leave alone
    are called as they are, without loading what would see to that. Does nothing once torch._dynamo is loaded."""
    if "torch._dynamo" in sys.modules:
        return
    for name in ("add_param_group", "state_dict", "load_state_dict", "zero_grad"):
        function: Any = getattr(getattr(torch.optim.Optimizer, name), "__wrapped__", None)
        if function is not None and not hasattr(function, _MARK):
            setattr(function, _MARK, function)
