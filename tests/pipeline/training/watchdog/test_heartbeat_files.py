"""Where a rank is and how long it may stay there; and beats between ranks.

Beats are written whole and read with suspicion, and silence is measured by the folder's own clock.
"""

import json
import os
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.training.settings.job import HangConfig
from pipeline.training.watchdog.heartbeat_files import (
    Beat,
    BeatWriter,
    HeartbeatFiles,
    Phase,
    Place,
    RankProgress,
    error_words,
    limit_seconds,
)
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
HANG = HangConfig(step_seconds=10, other_seconds=100, join_seconds=30)


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
    first.write(replace(BEAT, rank=0))  # makes the folder
    assert not second.is_hanging()
    first.say_hanging()
    assert second.is_hanging()
    assert not later.is_hanging()


def test_the_latest_beat_is_written_once_the_storage_answers(tmp_path: Path) -> None:
    files = HeartbeatFiles(tmp_path, rank=1, attempt="0001-abc")
    waiting = tmp_path / "heartbeats" / "rank-00001.json.part"
    waiting.parent.mkdir()
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
    files.write(BEAT)
    shutil.rmtree(run_dir / "heartbeats")
    files.write(BEAT)
    assert files.hear(1).beat == BEAT
    shutil.rmtree(run_dir)
    files.write(BEAT)
    assert not run_dir.exists()


def test_a_rank_goes_from_place_to_place() -> None:
    progress = RankProgress()
    assert progress.place.words() == "starting"
    progress.step_begins(17)
    assert progress.place == Place(phase=Phase.WAITING_FOR_DATA, step=17, is_first=True)
    progress.enters(Phase.COMPUTING)
    progress.step_begins(18)
    progress.enters(Phase.COMPUTING)
    assert progress.place == Place(phase=Phase.COMPUTING, step=18)
    for batch in range(3):
        progress.enters(Phase.EVALUATING, batch=batch)
        assert progress.place.is_first is (batch < 2), "the first batch compiles"
    assert progress.place.words() == "step 18, evaluating batch 2"
    progress.enters(Phase.EVALUATING)
    assert not progress.place.is_first, "the second evaluation has compiled"


def test_a_step_with_another_number_of_tokens_may_compile() -> None:
    progress = RankProgress()
    progress.compiling_steps = frozenset({3})
    found = []
    for step in range(1, 5):
        progress.step_begins(step)
        waits = progress.place.is_first
        progress.enters(Phase.COMPUTING)
        found.append((waits, progress.place.is_first))
    assert found == [(True, True), (False, False), (True, True), (False, False)]


def test_places_are_in_the_order_of_a_step() -> None:
    places = [
        Place(phase=Phase.STARTING),
        Place(phase=Phase.JOINING),
        Place(phase=Phase.WAITING_FOR_DATA, step=3),
        Place(phase=Phase.COMPUTING, step=3),
        Place(phase=Phase.EVALUATING, step=3, batch=1),
        Place(phase=Phase.EVALUATING, step=3, batch=2),
        Place(phase=Phase.SAVING, step=3),
        Place(phase=Phase.WAITING_FOR_DATA, step=4),
    ]
    assert [place.order for place in places] == sorted({place.order for place in places})


@pytest.mark.parametrize(
    ("place", "longest_seconds", "expected"),
    [
        pytest.param(Place(phase=Phase.COMPUTING, step=2), 1.0, 10, id="a step"),
        pytest.param(Place(phase=Phase.COMPUTING, step=2), 9.0, 27, id="slow steps"),
        pytest.param(Place(phase=Phase.WAITING_FOR_DATA, step=2), 9.0, 27, id="data for slow steps"),
        pytest.param(Place(phase=Phase.COMPUTING, step=1, is_first=True), 1.0, 100, id="the first step compiles"),
        pytest.param(Place(phase=Phase.SAVING, step=2), 90.0, 100, id="a save"),
        pytest.param(Place(phase=Phase.STARTING), 0.0, 100, id="the start"),
        pytest.param(Place(phase=Phase.JOINING), 0.0, 60, id="the ranks meet, then connect"),
        pytest.param(Place(phase=Phase.FINISHING, step=2), 0.0, 100, id="the end"),
    ],
)
def test_limits(place: Place, longest_seconds: float, expected: float) -> None:
    assert limit_seconds(place, HANG, longest_seconds=longest_seconds) == expected


def test_nothing_has_a_lower_limit_than_a_step() -> None:
    config = HangConfig(step_seconds=50, other_seconds=10)
    assert limit_seconds(Place(phase=Phase.SAVING), config, longest_seconds=0) == 50
