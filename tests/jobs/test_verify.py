"""Exit codes of `verify`, and the faults in its log."""

import logging
from pathlib import Path

import pytest

from jobs.verify import VerifyJob, run
from shards.errors import UserError
from tests.rigs.datasets import packed_folders


def test_a_good_dataset_ends_with_0(tmp_path: Path) -> None:
    assert run(VerifyJob(url=str(packed_folders(tmp_path)), deep=True)) == 0


def test_faults_are_listed_and_end_with_1(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    out = packed_folders(tmp_path)
    tar = out / "shards" / "shard-000001.tar"
    data = bytearray(tar.read_bytes())
    data[600] ^= 1
    tar.write_bytes(bytes(data))
    with caplog.at_level(logging.ERROR):
        assert run(VerifyJob(url=str(out))) == 1
    assert "shards/shard-000001.tar: its sha256 is not the manifest's" in caplog.text
    assert "crc32 of row 0" in caplog.text


@pytest.mark.parametrize(("url", "message"), [("", "URL is missing"), ("/nowhere", "no manifest")])
def test_no_dataset_is_the_users_mistake(url: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        run(VerifyJob(url=url))
