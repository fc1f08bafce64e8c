"""The valid files, made once for all tests of this folder."""

from pathlib import Path

import pytest

from tests.fuzz.campaign import valid_files


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each entry of VALID, which no test may change."""
    return valid_files(tmp_path_factory.mktemp("valid"))
