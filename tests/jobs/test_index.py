"""`patchline index` as a job: a folder, a pattern, a list, an index elsewhere."""

from dataclasses import replace
from pathlib import Path

import pytest

from jobs.index import IndexJob, run
from jobs.record import read_record
from shards.checking.verify import verify_dataset
from shards.dataset import open_dataset
from shards.errors import UserError
from tests.rigs.datasets import packed_folders


@pytest.fixture
def tars_url(tmp_path: Path) -> str:
    """Only the shards of a packed dataset: tars like any others."""
    return str(packed_folders(tmp_path) / "shards")


def test_a_folder(tars_url: str, tmp_path: Path) -> None:
    job = IndexJob(url=tars_url, samples_per_block=3, run_dir=str(tmp_path / "run"))
    assert run(job) == 0
    assert verify_dataset(tars_url, deep=True) == []
    assert open_dataset(tars_url).num_samples == 15
    assert read_record(tmp_path / "run" / "job.yaml", stage="index", kind=IndexJob) == job


def test_a_pattern_and_a_list(tars_url: str, tmp_path: Path) -> None:
    for name, job in {
        "pattern": IndexJob(url=f"{tars_url}/shard-{{000001..000002}}.tar"),
        "list": IndexJob(url=tars_url, tars_file=str(tmp_path / "list.txt")),
    }.items():
        (tmp_path / "list.txt").write_text("shard-000001.tar\nshard-000002.tar\n")
        index_url = str(tmp_path / name)
        assert run(IndexJob(**{**vars(job), "index_url": index_url, "label_field": "labels"})) == 0
        dataset = open_dataset(index_url)
        assert [shard.path for shard in dataset.manifest.shards] == ["shard-000001.tar", "shard-000002.tar"]
        assert verify_dataset(index_url, deep=True) == []


def test_an_index_elsewhere_is_found_from_any_folder(
    tars_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(IndexJob(url=str(Path(tars_url).relative_to(tmp_path)), index_url="elsewhere")) == 0
    monkeypatch.chdir("/")
    assert verify_dataset(str(tmp_path / "elsewhere")) == []


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "the URL of the tars is missing"),
        ({"workers": 0}, "workers is 0"),
        ({"max_quarantined": 2.0}, "max_quarantined is 2"),
        ({"url": "x", "samples_per_block": 0}, "samples_per_block is 0"),
        ({"url": "/nowhere"}, r"no \*.tar is below /nowhere"),
    ],
)
def test_mistakes(fields: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        run(IndexJob(**fields))  # type: ignore[arg-type]


def test_description_and_licence(tars_url: str) -> None:
    plain = IndexJob(url=tars_url)
    for job in (plain, replace(plain, description="Birds.", licence="CC0"), plain):
        assert run(job) == 0
    manifest = open_dataset(tars_url).manifest
    assert (manifest.description, manifest.licence) == ("Birds.", "CC0")
    assert verify_dataset(tars_url) == []
    with pytest.raises(UserError, match="--description has"):
        IndexJob(url=tars_url, description="\x00")
