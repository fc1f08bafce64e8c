"""timm and transformers for the parity tests, which are skipped with the reason where these are not installed."""

import importlib
from types import ModuleType
from typing import Any

import pytest
import torch

# What torchvision's _meta_registrations.py expects of its compiled half.
OPERATORS = ("nms", "qnms", "qroi_align", "roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool", "deform_conv2d")


@pytest.fixture(scope="session")
def torchvision_or_its_absence() -> None:
    """torchvision beside a torch of another build has no compiled operators; its Python half does once declared."""
    try:
        importlib.import_module("torchvision")
    except ImportError:
        return
    except RuntimeError:
        declare_operators()


def declare_operators() -> None:
    """Operators without kernels, for as long as the process lives."""
    library: Any = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
    for name in (*OPERATORS, *(f"_{name}_backward" for name in OPERATORS)):
        library.define(f"{name}(Tensor x) -> Tensor")
    KEPT.append(library)


KEPT: list[Any] = []


@pytest.fixture(scope="session")
def timm(torchvision_or_its_absence: None) -> ModuleType:
    """timm, the model zoo."""
    return imported("timm")


@pytest.fixture(scope="session")
def transformers(torchvision_or_its_absence: None) -> ModuleType:
    """Hugging Face transformers."""
    return imported("transformers")


def imported(name: str) -> ModuleType:
    """The module; the test is skipped, with the reason, where it is not installed."""
    module: ModuleType = pytest.importorskip(name, reason=f"{name} is not installed (pip install {name})")
    return module
