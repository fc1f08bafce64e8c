"""A store that lists late: GETs see every object at once, listings leave new ones out for a while."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jobs import exit_codes
from jobs.data.pack import PackJob
from jobs.data.pack import run as pack
from pipeline.checkpoints.attempts import ATTEMPTS, Attempt, attempt_to_json, list_committed
from pipeline.checkpoints.commit import retire
from pipeline.checkpoints.config import Retention
from pipeline.checkpoints.manifest import MANIFEST_NAME, CheckpointId
from shards.sources.kinds import FolderSource
from shards.store import open_store
from shards.verifying.verify import verify_dataset
from tests.rigs.cutting_proxy import CuttingProxy, cutting_proxy
from tests.rigs.datasets import file_hashes, object_hashes
from tests.rigs.images import class_folders
from tests.rigs.kills import run_and_kill, step_at_least
from tests.rigs.training import AT_ONCE, FinishedRuns, losses, pretrain_words, run


@pytest.fixture
def proxy(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[CuttingProxy]:
    """In front of the store, for the rest of the test."""
    with cutting_proxy(s3_endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        open_store.cache_clear()
        yield proxy


def test_packing_lists_nothing_that_it_needs(proxy: CuttingProxy, s3_bucket: str, tmp_path: Path) -> None:
    root = class_folders(tmp_path / "images", num_classes=2)
    job = PackJob(source=FolderSource(root=str(root)), samples_per_shard=4, samples_per_block=2)
    assert pack(PackJob(**{**vars(job), "out": str(tmp_path / "local")})) == exit_codes.DONE
    there = PackJob(**{**vars(job), "out": f"s3://{s3_bucket}/out"})
    proxy.hides = lambda _: True
    assert pack(there) == exit_codes.DONE
    proxy.hides = lambda _: False
    left = [fault.where for fault in verify_dataset(there.out)]
    assert left == ["work/listing-000000.parquet", "work/listing.json"], "and verify says that they may be deleted"
    assert pack(there) == exit_codes.DONE
    assert object_hashes(open_store(there.out)) == file_hashes(tmp_path / "local")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hides", "codes"),
    [
        pytest.param(lambda key: "/step-00000008/" in key, (exit_codes.DONE,), id="the newest checkpoint"),
        pytest.param(lambda _: True, (exit_codes.DONE,), id="everything", marks=pytest.mark.long),
    ],
)
def test_a_resumed_run_loses_nothing(
    hides: Callable[[str], bool],
    codes: tuple[int, ...],
    proxy: CuttingProxy,
    s3_bucket: str,
    digits_url: str,
    finished_runs: FinishedRuns,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    run_dir = tmp_path / "run"
    words = pretrain_words(digits_url, run_dir, "--checkpoint.url", f"s3://{s3_bucket}/run", *AT_ONCE)
    assert run_and_kill(words, run_dir, moment=step_at_least(9), num_ranks=1, log_dir=tmp_path)
    proxy.hides = hides
    assert run(words, num_ranks=1, log_dir=tmp_path) in codes
    said = capfd.readouterr().err
    assert "continuing from step 8" in said
    assert "Traceback" not in said
    proxy.hides = lambda _: False
    assert run(words, num_ranks=1, log_dir=tmp_path) == exit_codes.DONE
    assert losses(run_dir) == losses(finished_runs.get(1))


def test_retention_keeps_the_newest_though_its_attempt_is_not_listed(proxy: CuttingProxy, s3_bucket: str) -> None:
    store = open_store(f"s3://{s3_bucket}/run")
    first, second = (
        Attempt(token="0001-aaaaaaaa", resumed_from=None, skipped=()),
        CheckpointId(step=4, attempt="0001-aaaaaaaa"),
    )
    mine = Attempt(token="0002-bbbbbbbb", resumed_from=second, skipped=())
    for attempt in (first, mine):
        store.write(f"{ATTEMPTS}/{attempt.token}.json", attempt_to_json(attempt))
    newest = CheckpointId(step=8, attempt="0002-bbbbbbbb")
    for each in (second, newest):
        store.write(f"{each.folder}/{MANIFEST_NAME}", b"manifest")
    proxy.hides = lambda key: key.endswith(f"{ATTEMPTS}/0002-bbbbbbbb.json")
    retire(store, attempt=mine, newest=newest, retention=Retention(keep_newest=1))
    assert list_committed(store) == [newest]
