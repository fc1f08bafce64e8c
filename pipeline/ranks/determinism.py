"""Kernels of a GPU that compute the same bits again.

By default, several are free not to: attention's backward pass and cuDNN's convolutions add in whatever order their
blocks finish. Sources: PyTorch's notes on reproducibility, and NVIDIA's on cuBLAS ("Results reproducibility").
"""

from collections.abc import MutableMapping

import torch

from shards.errors import UserError, WillNotSucceedError
from shards.schema.config_values import shown_value

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
WORKSPACES = (":4096:8", ":16:8")  # with any other, cuBLAS may add in another order when several streams use it


def use_deterministic_kernels(environ: MutableMapping[str, str]) -> None:
    """Lets PyTorch take deterministic kernels only, and raise where an operator has none. UserError if the environment
    asks cuBLAS for something else. Call it before the first product on a GPU: cuBLAS reads the environment then."""
    found = environ.setdefault(WORKSPACE, WORKSPACES[0])
    if found not in WORKSPACES:
        raise UserError(
            f"{WORKSPACE} is {shown_value(found)} with engine.deterministic; allowed: {' or '.join(WORKSPACES)}; unset "
            "it, or give --engine.no-deterministic"
        )
    torch.use_deterministic_algorithms(True)  # flash and memory-efficient attention follow it in their backward passes
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # costs time; not needed
    torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN's attention has no deterministic backward pass
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False  # it chooses by timing


def refuse_missing_kernel(error: RuntimeError) -> None:
    """WillNotSucceedError if PyTorch has raised this error for an operator without a deterministic kernel."""
    operator, _, rest = str(error).partition(" ")
    if "does not have a deterministic implementation" in rest:
        raise WillNotSucceedError(
            f"engine.deterministic is on, but PyTorch has no deterministic kernel for {operator} on this GPU; give "
            "--engine.no-deterministic: the run then continues, equal to rounding"
        ) from error
