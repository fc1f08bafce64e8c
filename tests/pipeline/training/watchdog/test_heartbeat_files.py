"""Beats between ranks: written whole, read with suspicion, and silence measured by the folder's own clock."""

import json
import os
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.training.watchdog.heartbeat_files import Beat, BeatWriter, HeartbeatFiles, Phase, error_words
from shards.errors import TransientError, UserError
from tests.rigs.small_disk import small_disk

BEAT = Beat(
    rank=1,
    host="n1",
    pid=7,
    attempt="0001-abc",
    phase=Phase.COMPUTING,
    step=3,
    batch=0,
    seconds=1.5,
    limit_seconds=600.0,
    unix_time=1e9,
)


@pytest.fixture
def two(tmp_path: Path) -> tuple[HeartbeatFiles, HeartbeatFiles]:
    """Those of ranks 0 and 1."""
    first, second = (HeartbeatFiles(tmp_path, rank=rank, attempt="0001-abc") for rank in range(2))
    first.write(replace(BEAT, rank=0))
    return first, second


def test_a_beat_arrives(two: tuple[HeartbeatFiles, HeartbeatFiles], tmp_path: Path) -> None:
    two[1].write(BEAT)
    heard = two[0].hear(1)
    assert heard.beat == BEAT
    assert heard.beat.place.words() == "step 3, forward and backward"
    assert heard.silent_seconds < 60
    assert sorted(path.name for path in (tmp_path / "heartbeats").iterdir()) == ["rank-00000.json", "rank-00001.json"]


def test_silence_is_a_difference_of_two_times_of_the_folder(
    two: tuple[HeartbeatFiles, HeartbeatFiles], tmp_path: Path
) -> None:
    two[1].write(BEAT)
    own, other = (tmp_path / "heartbeats" / f"rank-{rank:05d}.json" for rank in range(2))
    os.utime(own, (0, 10**9))  # this host's clock says something else
    os.utime(other, (0, 10**9 - 14))
    assert two[0].hear(1).silent_seconds == 14


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="empty"),
        pytest.param("[" * 100_000, id="deep"),
        pytest.param(json.dumps({**vars(BEAT), "phase": "asleep"}), id="unknown phase"),
        pytest.param(json.dumps({**vars(BEAT), "step": -1}), id="out of range"),
        pytest.param(json.dumps({**vars(BEAT), "rank": 2}), id="another rank's"),
        pytest.param(json.dumps({**vars(BEAT), "attempt": "0000-old"}), id="of an earlier attempt"),
        pytest.param(json.dumps({**vars(BEAT), "host": "n" * 10_000}), id="too long"),
    ],
)
def test_what_is_no_beat_of_this_attempt_is_silence(
    two: tuple[HeartbeatFiles, HeartbeatFiles], tmp_path: Path, text: str
) -> None:
    (tmp_path / "heartbeats" / "rank-00001.json").write_text(text)
    assert two[0].hear(1).beat is None


def test_a_missing_folder_is_silence(tmp_path: Path) -> None:
    files = HeartbeatFiles(tmp_path / "gone", rank=0, attempt="0001-abc")
    files.write(BEAT)
    files.say_hanging()
    assert files.hear(1).beat is None
    assert not files.is_hanging()
    assert not (tmp_path / "gone").exists(), "a run directory that was deleted stays deleted"


def test_that_a_rank_hangs_is_told_to_its_own_attempt(tmp_path: Path) -> None:
    first, second = (HeartbeatFiles(tmp_path, rank=rank, attempt="0001-abc") for rank in range(2))
    later = HeartbeatFiles(tmp_path, rank=0, attempt="0002-def")
    assert not second.is_hanging()
    first.say_hanging()
    assert second.is_hanging()
    assert not later.is_hanging()


def test_the_latest_beat_is_written_once_the_storage_answers(tmp_path: Path) -> None:
    files = HeartbeatFiles(tmp_path, rank=1, attempt="0001-abc")
    waiting = tmp_path / "heartbeats" / "rank-00001.json.part"
    os.mkfifo(waiting)  # opening it for writing waits for a reader
    writer = BeatWriter(files)
    for step in range(3):
        writer.put(replace(BEAT, step=step))
    writer.flush(seconds=0.1)
    path = tmp_path / "heartbeats" / "rank-00001.json"
    assert not path.exists()
    with waiting.open() as reader:
        waiting.unlink(missing_ok=True)
        reader.read()
    writer.put(replace(BEAT, step=3))
    writer.close(seconds=60)
    assert json.loads(path.read_text())["step"] == 3


@pytest.mark.parametrize(
    ("error", "words"),
    [
        pytest.param(TransientError("after 3 steps: x is not there"), "after 3 steps: x is not there", id="ours"),
        pytest.param(OSError(28, "No space left", "/a"), "OSError: [Errno 28] No space left: '/a'", id="the system's"),
        pytest.param(RuntimeError("first\nsecond"), "RuntimeError: first", id="of many lines"),
        pytest.param(KeyboardInterrupt(), "KeyboardInterrupt", id="without words"),
        pytest.param(UserError(""), "UserError", id="ours without words"),
    ],
)
def test_an_error_in_words(error: BaseException, words: str) -> None:
    assert error_words(error) == words


def test_the_longest_error_is_still_read(two: tuple[HeartbeatFiles, HeartbeatFiles]) -> None:
    words = error_words(RuntimeError("\U0001f600" * 5000))
    two[1].write(replace(BEAT, error=words, host="h" * 250))
    heard = two[0].hear(1).beat
    assert heard is not None
    assert heard.error == words


def test_on_a_full_disk_a_beat_replaces_the_one_before(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", num_bytes=32 << 10) as disk:
        files = HeartbeatFiles(disk, rank=1, attempt="0001-abc")
        files.write(BEAT)
        with suppress(OSError), (disk / "filler").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1024))
        for beat in (replace(BEAT, phase=Phase.ENDED, error="No space left on device"), replace(BEAT, step=4)):
            files.write(beat)
            heard = HeartbeatFiles(disk, rank=1, attempt="0001-abc").hear(1).beat
            assert heard == beat
        assert sorted(path.name for path in (disk / "heartbeats").iterdir()) == ["rank-00001.json"]


def test_a_folder_that_was_removed_is_made_again_unless_its_run_is_gone(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    files = HeartbeatFiles(run_dir, rank=1, attempt="0001-abc")
    shutil.rmtree(run_dir / "heartbeats")
    files.write(BEAT)
    assert files.hear(1).beat == BEAT
    shutil.rmtree(run_dir)
    files.write(BEAT)
    assert not run_dir.exists()
