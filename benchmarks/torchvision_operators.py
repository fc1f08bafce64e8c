"""Imports torchvision's Python half with a torch of another build.

Not every package index has a CPU build of torchvision. A wheel built for CUDA cannot load its compiled operators with a
CPU build of torch, and `import torchvision` then fails at the first operator that its Python half looks up. timm,
transformers' image processors and MosaicML Streaming import torchvision, but use none of these operators (they are for
detection: non-maximum suppression, regions of interest). If their names are declared, without kernels, the import
succeeds; calling one fails with torchvision's own message.
"""

import importlib
from functools import cache
from types import ModuleType
from typing import Any

# Operators that torchvision's _meta_registrations.py and ops/ look up.
OPERATORS = ("nms", "qnms", "qroi_align", "roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool", "deform_conv2d")


def import_torchvision() -> ModuleType | None:
    """torchvision, with its operators declared if its compiled half does not load; None if it is not installed.

    Call this before importing anything that imports torchvision. Raises torchvision's own error if the declarations do
    not help.
    """
    try:
        return importlib.import_module("torchvision")
    except ModuleNotFoundError as error:
        if error.name != "torchvision":
            raise
        return None
    except RuntimeError:  # torch's error is: operator torchvision::nms does not exist
        declare_operators()
        return importlib.import_module("torchvision")


@cache
def declare_operators() -> object:
    """Declares the operators once for the life of the process (the cache keeps the library that holds them).

    Raises RuntimeError if torchvision's compiled half has defined them.
    """
    import torch  # noqa: PLC0415 - a benchmark measures what it imports, and when

    library: Any = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
    for name in (*OPERATORS, *(f"_{name}_backward" for name in OPERATORS)):
        library.define(f"{name}(Tensor x) -> Tensor")
    return library
