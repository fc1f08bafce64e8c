"""A writer that dies at any request of a save to S3 leaves the newest committed checkpoint whole, whether or not the
store has got the request.

Here at the first request in the gate, at every fifth in the long part; `make soak` has every one, and Ceph's gateway.
"""

from pathlib import Path

import pytest

from tests.rigs.cutting_proxy import cutting_proxy
from tests.rigs.writer_kills import saving_run

pytestmark = pytest.mark.slow


def kills(digits_url: str, folder: Path, bucket: str, endpoint: str, *, every: int, is_stored: bool) -> None:
    """Kills the writer of a run at the first request of a save, then at every `every`-th of each later save."""
    with cutting_proxy(endpoint) as proxy:
        environ = {"AWS_ENDPOINT_URL": proxy.endpoint}
        with saving_run(digits_url, folder / "run", f"s3://{bucket}/run", environ=environ) as run:
            counted = run.requests(proxy)
            assert counted >= 5, "a file, its report, the fence, the manifest, a deletion"
            wanted = range(1 + is_stored, counted + 1, every)
            found = [number for number in wanted if not run.kill_at_request(proxy, number, is_stored=is_stored)]
            proxy.goes_on.set()
    assert found == [], f"of {counted} requests these were not made"
    assert run.faults == []


@pytest.mark.long
def test_a_writer_killed_at_its_first_request_costs_only_that_save(
    digits_url: str, tmp_path: Path, s3_endpoint: str, s3_bucket: str
) -> None:
    kills(digits_url, tmp_path, s3_bucket, s3_endpoint, every=1000, is_stored=False)


@pytest.mark.long
@pytest.mark.parametrize("is_stored", [False, True], ids=["lost", "stored"])
def test_a_writer_killed_at_any_request_of_a_save_costs_only_that_save(
    digits_url: str, tmp_path: Path, s3_endpoint: str, s3_bucket: str, is_stored: bool
) -> None:
    kills(digits_url, tmp_path, s3_bucket, s3_endpoint, every=5, is_stored=is_stored)
