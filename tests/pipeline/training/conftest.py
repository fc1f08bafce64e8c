"""One packed digits dataset for all training tests."""

from dataclasses import replace
from pathlib import Path

import pytest

from jobs import pack
from jobs.recipes.pack import digits


@pytest.fixture(scope="session")
def digits_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The training split of the digits in a local folder."""
    url = str(tmp_path_factory.mktemp("packed") / "digits")
    assert pack.run(replace(digits(), out=url)) == 0
    return url


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run directory that does not exist yet."""
    return tmp_path / "run"
