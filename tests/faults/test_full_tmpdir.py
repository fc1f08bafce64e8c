"""TMPDIR is full: one line that names it, code 74, and the same command continues once there is room."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs import exit_codes
from shards.store import open_store
from tests.rigs.datasets import file_hashes, object_hashes, packed_folders
from tests.rigs.images import class_folders
from tests.rigs.interrupting import started
from tests.rigs.small_disk import in_tmpdir, small_disk
from tests.rigs.training import AT_ONCE, losses, pretrain_words


@pytest.fixture
def tmpdir(tmp_path: Path) -> Iterator[Path]:
    """A folder for temporary files with room for 16 kB."""
    with small_disk(tmp_path / "tmpdir", num_bytes=16 << 10) as folder:
        yield folder


def assert_no_room(tmpdir: Path, said: Path, *words: str) -> None:
    """The command ends with code 74 and one line, which names the folder."""
    with started(said, *words, environ={"TMPDIR": str(tmpdir)}, before=in_tmpdir) as command:
        code = command.end()
    assert code == exit_codes.CRASH, command.said
    where = f"no space left in {tmpdir}, the folder for temporary files; make room there"
    assert command.said.splitlines()[-1].startswith(f"error: {where}, or set TMPDIR to another folder; run the same")
    assert "Traceback" not in command.said
    assert [path for path in tmpdir.iterdir() if path.name != "others"] == []


@pytest.mark.parametrize("workers", ["1", "2"])
def test_packing_to_s3(tmpdir: Path, tmp_path: Path, s3_bucket: str, workers: str) -> None:
    """A shard is in a temporary file until it is uploaded."""
    root = class_folders(tmp_path / "images", num_classes=4, images_a_class=10)
    words = ["pack", "folder", "--source.root", str(root), "--samples-per-shard", "20", "--workers", workers]
    assert_no_room(tmpdir, tmp_path / "said", *words, "--out", f"s3://{s3_bucket}/out")
    with started(tmp_path / "again", *words, "--out", f"s3://{s3_bucket}/out") as command:
        assert command.end() == exit_codes.DONE
    with started(tmp_path / "local", *words, "--out", str(tmp_path / "out")) as command:
        assert command.end() == exit_codes.DONE
    assert object_hashes(open_store(f"s3://{s3_bucket}/out")) == file_hashes(tmp_path / "out")


def test_planning(tmpdir: Path, tmp_path: Path) -> None:
    """The plan's rows are in temporary files until all are dealt."""
    root = class_folders(tmp_path / "images", num_classes=10, images_a_class=100)
    words = ["pack", "folder", "--source.root", str(root), "--out", str(tmp_path / "out")]
    assert_no_room(tmpdir, tmp_path / "said", *words)


def test_verifying_on_s3(tmpdir: Path, tmp_path: Path, s3_bucket: str) -> None:
    """A shard is copied into a temporary file: that this fails is no fault of the dataset."""
    folder, store = packed_folders(tmp_path, num_classes=6), open_store(f"s3://{s3_bucket}/data")
    for path in folder.rglob("*"):
        if path.is_file():
            store.write(path.relative_to(folder).as_posix(), path.read_bytes())
    (tmpdir / "others").write_bytes(bytes(8 << 10))
    assert_no_room(tmpdir, tmp_path / "said", "verify", store.url)


def test_the_card_needs_no_room(tmpdir: Path, tmp_path: Path) -> None:
    folder = packed_folders(tmp_path)
    (tmpdir / "others").write_bytes(bytes(16 << 10))
    with started(tmp_path / "said", "card", str(folder), environ={"TMPDIR": str(tmpdir)}, before=in_tmpdir) as command:
        assert command.end() == exit_codes.DONE, command.said


@pytest.mark.long
def test_saving_to_s3(tmpdir: Path, tmp_path: Path, s3_bucket: str, digits_url: str) -> None:
    """Without a copy in memory, a rank's share of a checkpoint is in a temporary file until it is uploaded."""
    words = pretrain_words(digits_url, tmp_path / "run", "--checkpoint.url", f"s3://{s3_bucket}/run", *AT_ONCE)
    with started(tmp_path / "said", *words, environ={"TMPDIR": str(tmpdir)}, before=in_tmpdir) as command:
        code = command.end()
    assert code == exit_codes.CRASH
    assert f"not committed: rank 0: no space left in {tmpdir}, the folder for temporary files" in command.said
    assert "Traceback" not in command.said
    with started(tmp_path / "again", *words) as command:
        assert command.end() == exit_codes.DONE
    assert len(losses(tmp_path / "run")) == 16


@pytest.mark.long
def test_saving_to_s3_in_the_background_needs_no_room(
    tmpdir: Path, tmp_path: Path, s3_bucket: str, digits_url: str
) -> None:
    """The writer uploads the copy in memory."""
    (tmpdir / "others").write_bytes(bytes(16 << 10))
    words = pretrain_words(digits_url, tmp_path / "run", "--checkpoint.url", f"s3://{s3_bucket}/run")
    with started(tmp_path / "said", *words, environ={"TMPDIR": str(tmpdir)}, before=in_tmpdir) as command:
        assert command.end() == exit_codes.DONE, command.said
    assert "not committed" not in command.said
