"""Fixtures for all tests: an S3 server, the shared test data; and what is skipped without a Slurm."""

import os
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import boto3
import pytest

from jobs import pack
from jobs.recipes.pack import digits
from tests.rigs.s3 import moto_server
from tests.rigs.training import FinishedRuns

CHECKOUT = Path(__file__).resolve().parent.parent
SLURM_PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests marked `slurm` where it is not installed, unless PATCHLINE_REQUIRE names it."""
    missing = [program for program in SLURM_PROGRAMS if shutil.which(program) is None]
    if not missing or "slurm" in os.environ.get("PATCHLINE_REQUIRE", ""):
        return
    reason = f"Slurm is not installed: no {', '.join(missing)} on PATH (Debian: slurm-wlm munge)"
    for item in items:
        if item.get_closest_marker("slurm"):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def moto_endpoint() -> Iterator[str]:
    """One S3 server for all tests of a run."""
    with moto_server() as endpoint:
        yield endpoint


@pytest.fixture
def s3_endpoint(moto_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The S3 server's endpoint, with credentials and endpoint in the environment, for child processes too."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ENDPOINT_URL", moto_endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test-secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    return moto_endpoint


@pytest.fixture
def s3_bucket(s3_endpoint: str) -> str:
    """The name of a new, empty bucket."""
    bucket = f"test-{secrets.token_hex(6)}"
    boto3.session.Session().client("s3", endpoint_url=s3_endpoint).create_bucket(Bucket=bucket)
    return bucket


@pytest.fixture(scope="session")
def digits_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The training split of the digits, packed into a local folder."""
    url = str(tmp_path_factory.mktemp("packed") / "digits")
    assert pack.run(replace(digits(), out=url)) == 0
    return url


@pytest.fixture(scope="session")
def finished_runs(digits_url: str, tmp_path_factory: pytest.TempPathFactory) -> FinishedRuns:
    """Finished tiny runs, each made when it is first asked for."""
    return FinishedRuns(tmp_path_factory.mktemp("finished"), digits_url)


@pytest.fixture(scope="session")
def test_data() -> Path:
    """Real images: the folder PATCHLINE_TEST_DATA, or shared/data beside the checkout."""
    folder = Path(os.environ.get("PATCHLINE_TEST_DATA", CHECKOUT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no test data: {folder} is not there; set PATCHLINE_TEST_DATA")
    return folder
