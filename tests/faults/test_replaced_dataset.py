"""A dataset replaced under way by another of the same shape: a run never mixes the two, and ends with one message."""

from dataclasses import replace
from pathlib import Path

import pytest

from jobs import exit_codes
from jobs.data.pack import run as pack
from jobs.recipes.pack import digits
from shards.dataset import open_dataset
from shards.errors import UserError
from shards.manifest import index_path, shard_path
from shards.reading.samples import read_sample
from shards.store import Store, open_store
from tests.rigs.interrupting import started
from tests.rigs.training import losses, pretrain_words


@pytest.fixture(scope="module")
def other_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same digits in another order."""
    url = str(tmp_path_factory.mktemp("other") / "digits")
    assert pack(replace(digits(), out=url, seed=5)) == exit_codes.DONE
    return url


def copy(folder: str, store: Store, *, below: str = "") -> None:
    """Writes the files of a dataset over those of another."""
    for path in sorted((Path(folder) / below).rglob("*")):
        if path.is_file():
            store.write(path.relative_to(folder).as_posix(), path.read_bytes())


@pytest.fixture(params=["folder", pytest.param("S3", marks=pytest.mark.long)])
def store(request: pytest.FixtureRequest, tmp_path: Path, digits_url: str) -> Store:
    """A copy of the digits."""
    bucket = request.getfixturevalue("s3_bucket") if request.param == "S3" else ""
    store = open_store(f"s3://{bucket}/data" if bucket else str(tmp_path / "data"))
    copy(digits_url, store)
    return store


def test_what_is_read_is_of_one_dataset(store: Store, other_url: str, digits_url: str) -> None:
    """Replaced in the opposite order of reading: index files that are held, tars, and then index files."""
    dataset, before = open_dataset(store.url), open_dataset(digits_url)
    assert read_sample(dataset, 0).data == read_sample(before, 0).data
    copy(other_url, store, below="shards")
    sample = read_sample(dataset, 1)
    assert sample.fault, "its crc32 is not the index's"
    assert sample.data is None or bytes(sample.data) == bytes(read_sample(before, 1).data or b"")
    copy(other_url, store)
    assert store.read(shard_path(1)) != open_store(digits_url).read(shard_path(1))
    with pytest.raises(UserError, match=rf"{index_path(1)} is damaged|was replaced"):
        dataset.sample_rows(1)
    assert open_dataset(store.url).fingerprint != dataset.fingerprint


@pytest.mark.slow
def test_training_ends_with_one_message(store: Store, other_url: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    words = pretrain_words(store.url, run_dir, "--steps", "200", "--checkpoint.every-steps", "20", "--threads", "1")
    with started(tmp_path / "said", *words) as command:
        command.wait_until(lambda: (run_dir / "metrics.jsonl").exists() and len(losses(run_dir)) > 2)
        copy(other_url, store)
        code = command.end()
    if code != exit_codes.DONE:  # it had read all that it needed
        assert code in (exit_codes.CRASH, exit_codes.WILL_NOT_SUCCEED), command.said
        (error,) = [line for line in command.said.splitlines() if line.startswith("error:")]
        assert store.url in error
    assert "Traceback" not in command.said
    with started(tmp_path / "again", *words) as command:
        code = command.end()
    assert code in (exit_codes.USER_MISTAKE, exit_codes.WILL_NOT_SUCCEED, exit_codes.DONE)
    if code != exit_codes.DONE:
        assert "data.dataset: before" in command.said
