"""torchvision's Python half beside a torch of another build.

Of torchvision there is no CPU build everywhere: a wheel built for CUDA, beside a CPU build of torch, cannot load its
compiled operators, and then `import torchvision` fails on the first of them that its Python half looks up. timm,
transformers' image processors and MosaicML Streaming import torchvision, and use none of these operators (they are of
detection: non-maximum suppression, regions of interest). With their names declared, without kernels, the import goes
through; a call of one fails with torchvision's own message.
"""

import importlib
from functools import cache
from types import ModuleType
from typing import Any

# What torchvision's _meta_registrations.py and ops/ look up.
OPERATORS = ("nms", "qnms", "qroi_align", "roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool", "deform_conv2d")


def import_torchvision() -> ModuleType | None:
    """torchvision, its operators declared where its compiled half does not load; None where it is not installed.

    Call it before what imports torchvision itself. Raises what torchvision raises where the declarations do not help.
    """
    try:
        return importlib.import_module("torchvision")
    except ModuleNotFoundError as error:
        if error.name != "torchvision":
            raise
        return None
    except RuntimeError:  # operator torchvision::nms does not exist
        declare_operators()
        return importlib.import_module("torchvision")


@cache
def declare_operators() -> object:
    """Declare the operators, once, for as long as the process lives (the cache keeps what holds them).

    Raises RuntimeError where torchvision's compiled half has defined them.
    """
    import torch  # noqa: PLC0415 - a benchmark measures what it imports, and when

    library: Any = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
    for name in (*OPERATORS, *(f"_{name}_backward" for name in OPERATORS)):
        library.define(f"{name}(Tensor x) -> Tensor")
    return library
