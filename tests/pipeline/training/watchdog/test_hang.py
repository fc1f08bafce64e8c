"""Which rank is named for a hung run, from tables of heartbeats; and the file of a rank's stacks."""

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.training.watchdog.hang import hang_message, stacks_path, write_stacks
from pipeline.training.watchdog.heartbeat_files import Beat, Heard, Phase

SILENT_AFTER = 5.0
END = ". Stacks are in RUN/stacks; run the same command to continue"
NEVER = Heard(rank=2, beat=None, silent_seconds=float("inf"))
PEERS = "; the others wait for it in step 17, forward and backward"
SILENCE = "; whoever is silent is stopped, or its host or its disk does not answer"


def heard(
    rank: int, phase: Phase = Phase.COMPUTING, *, step: int = 17, batch: int = 0, silent_seconds: float = 0.0
) -> Heard:
    beat = Beat(
        rank=rank,
        host=f"n{rank}",
        pid=100 + rank,
        attempt="0001-abc",
        phase=phase,
        step=step,
        batch=batch,
        seconds=10.0,
        limit_seconds=10.0,
        unix_time=1e9,
    )
    return Heard(rank=rank, beat=beat, silent_seconds=silent_seconds)


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        pytest.param(
            [heard(0), heard(1), heard(2, Phase.WAITING_FOR_DATA, silent_seconds=14)],
            "rank 2 of 3 on host n2 (process 102) has been silent for 14 s; last heard in step 17, waiting for data"
            + PEERS
            + SILENCE,
            id="a rank is silent",
        ),
        pytest.param(
            [heard(0, step=16, silent_seconds=9), heard(1), NEVER],
            "rank 0 of 3 on host n0 (process 100) has been silent for 9 s; last heard in step 16, forward and backward;"
            " rank 2 of 3 has left no heartbeat since the start" + PEERS + SILENCE,
            id="two are",
        ),
        pytest.param(
            [heard(0), heard(1, Phase.WAITING_FOR_DATA), heard(2)],
            "rank 1 of 3 on host n1 (process 101) has stood for 10 s in step 17, waiting for data" + PEERS,
            id="one is behind",
        ),
        pytest.param(
            [heard(0), heard(1, Phase.ENDED), heard(2)],
            "rank 1 of 3 on host n1 (process 101) has ended" + PEERS,
            id="one has ended",
        ),
        pytest.param(
            [heard(0), heard(1), heard(2)],
            "all 3 ranks have stood for 10 s in step 17, forward and backward: an exchange between them does not end",
            id="all stand at one place",
        ),
        pytest.param(
            [heard(rank, Phase.WAITING_FOR_DATA) for rank in range(3)],
            "all 3 ranks have stood for 10 s in step 17, waiting for data",
            id="all wait for data",
        ),
    ],
)
def test_three_ranks(ranks: list[Heard], expected: str) -> None:
    message = hang_message(ranks, num_ranks=3, silent_after_seconds=SILENT_AFTER, stacks="RUN/stacks")
    assert message == f"the run hangs: {expected}{END}"


def test_one_rank() -> None:
    message = hang_message(
        [heard(0, Phase.EVALUATING, batch=3)], num_ranks=1, silent_after_seconds=SILENT_AFTER, stacks="RUN/stacks"
    )
    place = "rank 0 of 1 on host n0 (process 100) has stood for 10 s in step 17, evaluating batch 3"
    assert message == f"the run hangs: {place}{END}"


def test_a_lost_switch_is_one_line() -> None:
    ranks = [heard(0), *(replace(heard(rank), silent_seconds=60) for rank in range(1, 512))]
    message = hang_message(ranks, num_ranks=512, silent_after_seconds=SILENT_AFTER, stacks="RUN/stacks")
    assert "; 508 more ranks likewise; the others wait" in message
    assert len(message) < 600


def wait_for_bytes(begun: threading.Event, gate: threading.Event) -> None:
    begun.set()
    gate.wait(60)


def test_the_stacks_of_all_threads_are_written(tmp_path: Path) -> None:
    begun, gate = threading.Event(), threading.Event()
    thread = threading.Thread(target=wait_for_bytes, name="reader", args=(begun, gate))
    thread.start()
    begun.wait(60)
    path = stacks_path(tmp_path, rank=3, attempt="0001-abc")
    write_stacks(path, words="rank 3 stood there")
    gate.set()
    thread.join()
    assert path == tmp_path / "stacks" / "rank-00003-attempt-0001-abc.txt"
    text = path.read_text()
    assert text.startswith("rank 3 stood there\n")
    assert "in wait_for_bytes" in text
    identity = f"Thread 0x{thread.ident:016x}"
    assert f"{identity} (most recent call first)" in text
    assert f"{identity} is reader\n" in text
    assert "in test_the_stacks_of_all_threads_are_written" in text


def test_a_start_without_an_attempt_has_a_file_too(tmp_path: Path) -> None:
    assert stacks_path(tmp_path, rank=0, attempt="").name == "rank-00000-attempt-starting.txt"


def test_a_run_directory_that_is_gone_stays_gone(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_stacks(stacks_path(tmp_path / "gone", rank=0, attempt=""), words="")
