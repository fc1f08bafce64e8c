"""timm and transformers, for tests that compare with them."""

from types import ModuleType

import pytest

from benchmarks.torchvision_operators import declare_operators
from tests.pipeline.models.parity import imported

__all__ = ["declare_operators"]


@pytest.fixture(scope="session")
def timm() -> ModuleType:
    """timm, the model zoo."""
    return imported("timm")


@pytest.fixture(scope="session")
def transformers() -> ModuleType:
    """Hugging Face transformers."""
    return imported("transformers")
