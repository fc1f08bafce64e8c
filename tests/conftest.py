"""Fixtures for all tests: S3 servers, shared test data, and skipping tests that need Slurm or Ceph if it is not
installed."""

import os
import random
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import boto3
import pytest
from hypothesis import settings

from jobs.data import pack
from jobs.recipes.pack import digits
from shards.store import open_store
from tests.rigs import ceph
from tests.rigs.forks import forks
from tests.rigs.made_once import MadeOnce
from tests.rigs.s3 import moto_server

if TYPE_CHECKING:
    from tests.rigs.training import FinishedRuns

pytest_plugins = (
    *("tests.rigs.ends", "tests.rigs.cpu_seconds"),
    *("tests.rigs.groups", "tests.rigs.long_parts", "tests.rigs.outcome"),
)

CHECKOUT = Path(__file__).resolve().parent.parent
SLURM_PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch")
WHAT_IS = {"slurm": "Slurm", "rgw": "Ceph's RADOS Gateway"}
PACKAGES = {"slurm": "slurm-wlm munge", "rgw": "ceph-mon ceph-mgr ceph-osd radosgw ceph-common"}


def pytest_configure() -> None:
    """Sets up Ctrl-C, torch.compile's cache, the fork server and Hypothesis.

    A shell's background jobs ignore Ctrl-C, those of `nohup` SIGHUP, and pass that on to their children, but tests send
    both.

    A CPU that simulates a lesser one gets its own cache, because torch.compile's cache does not tell them apart
    (kernels of one crash on the other, or return NaN).

    The fork server is set up here because packing's workers may be forked before any test forks.

    Hypothesis gives an example 0.2 s by default, which on a busy machine fails tests that found nothing.
    """
    settings.register_profile("patient", deadline=None)
    settings.load_profile("patient")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    kernels = f"torchinductor-tests-{os.getuid()}-{os.environ.get('ATEN_CPU_CAPABILITY', 'native')}"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir()) / kernels))
    forks()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skips tests that need programs that are not installed, unless PATCHLINE_REQUIRE (such as `slurm,rgw`) names their
    marker."""
    missing = {
        "slurm": [program for program in SLURM_PROGRAMS if shutil.which(program) is None],
        "rgw": ceph.missing_programs(),
    }
    required = {name.strip() for name in os.environ.get("PATCHLINE_REQUIRE", "").split(",") if name.strip()}
    if unknown := required - missing.keys():
        raise pytest.UsageError(f"PATCHLINE_REQUIRE names {', '.join(unknown)}; known are {', '.join(missing)}")
    for marker, programs in missing.items():
        if not programs or marker in required:
            continue
        reason = f"{WHAT_IS[marker]} is not installed: no {', '.join(programs)} on PATH (Debian: {PACKAGES[marker]})"
        for item in items:
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def _stores_of_this_test() -> Iterator[None]:
    """A process caches its stores, but endpoints and credentials change from test to test."""
    open_store.cache_clear()
    yield
    open_store.cache_clear()


@pytest.fixture(autouse=True)
def _random_numbers_of_this_test() -> None:
    """Starts each test at the same random numbers, whichever tests ran before it."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(scope="session")
def moto_endpoint() -> Iterator[str]:
    """One S3 server for all tests of a run."""
    with moto_server() as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
def ceph_gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ceph.Gateway]:
    """One Ceph for all tests of a run, started by the first test that uses it."""
    with ceph.ceph_gateway(tmp_path_factory.mktemp("ceph")) as gateway:
        yield gateway


@pytest.fixture
def s3_endpoint(moto_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The S3 server's endpoint. It and the credentials are in the environment, for child processes too."""
    return use_s3(monkeypatch, moto_endpoint, access_key="test", secret_key="test-secret")


@pytest.fixture
def ceph_endpoint(ceph_gateway: ceph.Gateway, monkeypatch: pytest.MonkeyPatch) -> str:
    """As `s3_endpoint`, with Ceph's gateway."""
    keys = {"access_key": ceph_gateway.access_key, "secret_key": ceph_gateway.secret_key}
    return use_s3(monkeypatch, ceph_gateway.endpoint, **keys)


def use_s3(monkeypatch: pytest.MonkeyPatch, endpoint: str, *, access_key: str, secret_key: str) -> str:
    """Sets all environment variables that botocore reads, and removes the others."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret_key)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    return endpoint


@pytest.fixture
def s3_bucket(s3_endpoint: str) -> str:
    """The name of a new, empty bucket."""
    return new_bucket(s3_endpoint)


@pytest.fixture
def ceph_bucket(ceph_endpoint: str) -> str:
    """The name of a new, empty bucket of Ceph's gateway."""
    return new_bucket(ceph_endpoint)


@pytest.fixture(params=["s3", pytest.param("ceph", marks=pytest.mark.rgw)])
def any_bucket(request: pytest.FixtureRequest) -> str:
    """A new, empty bucket of each S3 server in turn."""
    bucket: str = request.getfixturevalue(f"{request.param}_bucket")
    return bucket


def new_bucket(endpoint: str) -> str:
    """Creates a bucket with the credentials in the environment."""
    bucket = f"test-{secrets.token_hex(6)}"
    boto3.session.Session().client("s3", endpoint_url=endpoint).create_bucket(Bucket=bucket)
    return bucket


@pytest.fixture(scope="session")
def made_once(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MadeOnce]:
    """Folders that all workers of this run of pytest share. Fails at the end if a test changed one."""
    folder = tmp_path_factory.getbasetemp()
    is_worker = hasattr(request.config, "workerinput")
    made_once = MadeOnce((folder.parent if is_worker else folder) / "made-once")
    yield made_once
    if changed := made_once.changed():
        pytest.fail("a test changed what all tests share; let it copy what it changes:\n" + "\n".join(changed))


@pytest.fixture(scope="session")
def digits_url(made_once: MadeOnce) -> str:
    """The training split of the digits, packed into a local folder. Do not change it."""

    def make(folder: Path) -> None:
        assert pack.run(replace(digits(), out=str(folder / "digits"))) == 0

    return str(made_once.folder("digits", make) / "digits")


@pytest.fixture(scope="session")
def finished_runs(made_once: MadeOnce, digits_url: str) -> "FinishedRuns":
    """Finished tiny runs, each trained on first use."""
    from tests.rigs.training import FinishedRuns  # noqa: PLC0415  # tests/shards run without torch

    return FinishedRuns(made_once, digits_url)


@pytest.fixture(scope="session")
def test_data() -> Path:
    """Real images: the folder PATCHLINE_TEST_DATA, or shared/data beside the checkout."""
    folder = Path(os.environ.get("PATCHLINE_TEST_DATA", CHECKOUT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no test data: {folder} is not there; set PATCHLINE_TEST_DATA")
    return folder
