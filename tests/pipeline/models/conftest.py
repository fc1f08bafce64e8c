"""timm and transformers, for tests that compare with them."""

from types import ModuleType

import pytest

from tests.pipeline.models.parity import imported


@pytest.fixture(scope="session")
def timm() -> ModuleType:
    """timm, the model zoo."""
    return imported("timm")


@pytest.fixture(scope="session")
def transformers() -> ModuleType:
    """Hugging Face transformers."""
    return imported("transformers")
