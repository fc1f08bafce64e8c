"""The stages of datasets: what `patchline index` and `patchline verify` do, and which values their jobs refuse."""

import io
import logging
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jobs.data.index import run as index
from jobs.data.verify import VerifyJob
from jobs.data.verify import run as verify
from jobs.record import read_record
from jobs.settings.data import IndexJob, PackJob
from shards.dataset import open_dataset
from shards.errors import UserError
from shards.verifying.verify import verify_dataset
from tests.rigs.datasets import packed_folders
from tests.rigs.images import image_bytes


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (PackJob, {"workers": 0}, "workers is 0; allowed: 1 or more"),
        (PackJob, {"samples_per_shard": 0}, "samples_per_shard is 0; allowed: 1 or more"),
        (PackJob, {"samples_per_block": -1}, "samples_per_block is -1; allowed: 1 or more"),
        (PackJob, {"seed": -1}, "seed is -1; allowed: 0 to"),
        (PackJob, {"seed": 2**63}, "seed is 9223372036854775808; allowed: 0 to"),
        (PackJob, {"max_quarantined": 1.5}, "max_quarantined is 1.5; allowed: 0 to 1"),
        (PackJob, {"part": "8/8"}, "--part is '8/8'; allowed: I/N with I from 0 to N-1"),
        (PackJob, {"part": f"0/{'9' * 5000}"}, "...; allowed: I/N with I from 0 to N-1"),
        (PackJob, {"part": "0/8"}, "--part 0/8 needs --phase scan or --phase shards"),
        (IndexJob, {"workers": 0}, "workers is 0; allowed: 1 or more"),
        (IndexJob, {"max_quarantined": -1.0}, "max_quarantined is -1.0; allowed: 0 to 1"),
    ],
)
def test_bad_values_are_refused(kind: Any, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as raised:
        kind(**fields)
    assert message in str(raised.value)


def test_a_share_is_numbers() -> None:
    assert PackJob(part="3/8", phase="scan").share == (3, 8)


@pytest.fixture
def tars_url(tmp_path: Path) -> str:
    """Only the shards of a packed dataset: tars like any others."""
    return str(packed_folders(tmp_path) / "shards")


def test_a_folder_is_indexed(tars_url: str, tmp_path: Path) -> None:
    job = IndexJob(url=tars_url, samples_per_block=3, run_dir=str(tmp_path / "run"))
    assert index(job) == 0
    assert verify_dataset(tars_url, deep=True) == []
    assert open_dataset(tars_url).num_samples == 15
    assert read_record(tmp_path / "run" / "job.yaml", stage="index", kind=IndexJob) == job


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        (("cat", "Cat"), ["2 classes (Cat, cat)", "the classes 'Cat', 'cat' differ only in case"]),
        (("0.0", "0"), ["1 class (0)", "there is only one class, '0'"]),
        (
            ("0", "0"),
            ["1 class (0)", "there is only one class, '0', so there is nothing to tell it from; give --label"],
        ),
        (("0", "2"), ["3 classes (0, 1, 2)", "without any image: 1 class (1)"]),
        (("2", "2"), ["without any image: 2 classes (0, 1)", "only one class has images"]),
    ],
)
def test_what_is_said_about_the_classes_of_tars(
    labels: tuple[str, ...], said: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for number, label in enumerate(labels):
            for name, data in ((f"{number}.png", image_bytes(number)), (f"{number}.cls", label.encode())):
                member = tarfile.TarInfo(name)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    caplog.set_level(logging.INFO)
    assert index(IndexJob(url=str(tmp_path))) == 0
    assert all(words in caplog.text for words in said), caplog.text


def test_a_pattern_and_a_list_are_indexed(tars_url: str, tmp_path: Path) -> None:
    for name, job in {
        "pattern": IndexJob(url=f"{tars_url}/shard-{{000001..000002}}.tar"),
        "list": IndexJob(url=tars_url, tars_file=str(tmp_path / "list.txt")),
    }.items():
        (tmp_path / "list.txt").write_text("shard-000001.tar\nshard-000002.tar\n")
        index_url = str(tmp_path / name)
        assert index(IndexJob(**{**vars(job), "index_url": index_url, "label_field": "labels"})) == 0
        dataset = open_dataset(index_url)
        assert [shard.path for shard in dataset.manifest.shards] == ["shard-000001.tar", "shard-000002.tar"]
        assert verify_dataset(index_url, deep=True) == []


def test_an_index_elsewhere_is_found_from_any_folder(
    tars_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert index(IndexJob(url=str(Path(tars_url).relative_to(tmp_path)), index_url="elsewhere")) == 0
    monkeypatch.chdir("/")
    assert verify_dataset(str(tmp_path / "elsewhere")) == []


def test_description_and_licence(tars_url: str) -> None:
    plain = IndexJob(url=tars_url)
    for job in (plain, replace(plain, description="Birds.", licence="CC0"), plain):
        assert index(job) == 0
    manifest = open_dataset(tars_url).manifest
    assert (manifest.description, manifest.licence) == ("Birds.", "CC0")
    assert verify_dataset(tars_url) == []
    with pytest.raises(UserError, match="--description has"):
        IndexJob(url=tars_url, description="\x00")


def test_a_good_dataset_ends_with_0(tmp_path: Path) -> None:
    assert verify(VerifyJob(url=str(packed_folders(tmp_path)), deep=True)) == 0


def test_faults_are_listed_and_end_with_1(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    out = packed_folders(tmp_path)
    tar = out / "shards" / "shard-000001.tar"
    data = bytearray(tar.read_bytes())
    data[600] ^= 1
    tar.write_bytes(bytes(data))
    with caplog.at_level(logging.ERROR):
        assert verify(VerifyJob(url=str(out))) == 1
    assert "shards/shard-000001.tar: its sha256 is not the manifest's" in caplog.text
    assert "crc32 of row 0" in caplog.text
