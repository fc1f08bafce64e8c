"""Which processes the heartbeat ends, with limits of seconds; real runs are in tests/faults."""

import json
import os
import shutil
import signal
import sys
import threading
import time
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest

from jobs import exit_codes
from pipeline.training.settings.job import HangConfig
from pipeline.training.watchdog import heartbeat
from pipeline.training.watchdog.heartbeat import Heartbeat
from pipeline.training.watchdog.heartbeat_files import Phase, RankProgress
from tests.rigs.forks import forks
from tests.rigs.processes import one_world

LIMIT_SECONDS = 3.0  # a healthy rank may starve for half of it on a busy machine
HANG = HangConfig(step_seconds=LIMIT_SECONDS, other_seconds=60)
SOON = HangConfig(step_seconds=0.8, other_seconds=60)  # for ranks that do hang
LONG = 3 * LIMIT_SECONDS
Stay = tuple[Phase, int, float]  # phase, batch, seconds
MUCH_LATER = 120.0


def until_all_stand(run_dir: Path, rank: int, num_ranks: int) -> None:
    """Ranks that hear each other begin together, whichever process starts first."""
    (run_dir / f"stands-{rank}").touch()
    deadline, pause = time.monotonic() + MUCH_LATER, threading.Event()
    while not all((run_dir / f"stands-{other}").exists() for other in range(num_ranks)):
        assert time.monotonic() < deadline
        pause.wait(0.01)


def stand(
    run_dir: Path, rank: int, num_ranks: int, num_steps: int, stays: tuple[Stay, ...], config: HangConfig
) -> None:
    """The main thread of a rank that has begun `num_steps` steps and then stays at places."""
    with (run_dir / f"said-{rank}").open("wb") as said:
        os.dup2(said.fileno(), 2)
    progress, pause = RankProgress(), threading.Event()
    progress.attempt = "0001-abc"
    with Heartbeat(run_dir, config, progress, world=one_world(rank, num_ranks, port=1)):
        until_all_stand(run_dir, rank, num_ranks)
        for step in range(1, num_steps + 1):
            progress.step_begins(step)
        for phase, batch, seconds in stays:
            progress.enters(phase, batch=batch)
            pause.wait(seconds)


def start(
    run_dir: Path, *stays: Stay, rank: int = 0, num_ranks: int = 1, num_steps: int = 2, config: HangConfig = HANG
) -> ForkServerProcess:
    process = forks().Process(target=stand, args=(run_dir, rank, num_ranks, num_steps, stays, config))
    process.start()
    return process


def codes(*processes: ForkServerProcess) -> list[int | None]:
    for process in processes:
        process.join(MUCH_LATER)
    return [process.exitcode for process in processes]


def said(run_dir: Path, *ranks: int) -> str:
    return "".join((run_dir / f"said-{rank}").read_text() for rank in ranks)


@pytest.mark.parametrize("place", [(Phase.COMPUTING, 0), (Phase.EVALUATING, 2)], ids=["a step", "a batch"])
def test_a_rank_is_ended_where_it_stands_too_long(tmp_path: Path, place: tuple[Phase, int]) -> None:
    assert codes(start(tmp_path, (*place, MUCH_LATER), config=SOON)) == [74], said(tmp_path, 0)
    assert "the run hangs: rank 0 of 1" in said(tmp_path, 0)
    (stacks,) = (tmp_path / "stacks").iterdir()
    assert stacks.name == "rank-00000-attempt-0001-abc.txt"
    assert "in stand\n" in stacks.read_text()


def join_and_stand(run_dir: Path, said: Path) -> None:
    """A rank whose NCCL does not connect to the others, before the run has a folder."""
    with said.open("wb") as errors:
        os.dup2(errors.fileno(), 2)
    progress, config = RankProgress(), HangConfig(step_seconds=MUCH_LATER, other_seconds=MUCH_LATER, join_seconds=1)
    with Heartbeat(run_dir, config, progress, world=one_world(0, 2, port=1)):
        progress.enters(Phase.JOINING)
        threading.Event().wait(MUCH_LATER)


@pytest.mark.parametrize("can_write", [True, False])
def test_a_start_that_hangs_leaves_its_stacks_or_says_why_not(tmp_path: Path, *, can_write: bool) -> None:
    run_dir = tmp_path / "runs" / "first"
    if not can_write:
        run_dir.parent.touch()
    process = forks().Process(target=join_and_stand, args=(run_dir, tmp_path / "said"))
    process.start()
    assert codes(process) == [74]
    told = (tmp_path / "said").read_text()
    assert "rank 0 of 2 on host " in told
    assert " s in joining the other ranks. Stacks " in told
    if can_write:
        assert f"Stacks are in {run_dir}/stacks; " in told
        assert "in join_and_stand\n" in (run_dir / "stacks" / "rank-00000-attempt-starting.txt").read_text()
    else:
        assert f"Stacks cannot be written to {run_dir}/stacks (Not a directory); " in told


IN_TIME: dict[str, tuple[int, tuple[Stay, ...]]] = {
    "a long start": (0, ((Phase.STARTING, 0, LONG),)),
    "a first step that compiles": (1, ((Phase.COMPUTING, 0, LONG),)),
    "a long save": (2, ((Phase.SAVING, 0, LONG),)),
    "a long end": (2, ((Phase.FINISHING, 0, LONG),)),
    "a first evaluation that compiles": (2, ((Phase.EVALUATING, 0, 0.0), (Phase.EVALUATING, 1, LONG))),
    "a long evaluation": (2, tuple((Phase.EVALUATING, batch, LIMIT_SECONDS / 4) for batch in range(10))),
    "a step of less than three times the longest": (
        2,
        tuple((Phase.COMPUTING, 0, LIMIT_SECONDS * share) for share in (0.6, 1.2)),
    ),
}


@pytest.mark.long
def test_a_rank_that_may_stand_there_is_left_alone(tmp_path: Path) -> None:
    """All of them at once: they only wait."""
    ranks: dict[str, ForkServerProcess] = {}
    for name, (num_steps, stays) in IN_TIME.items():
        (tmp_path / name).mkdir()
        ranks[name] = start(tmp_path / name, *stays, num_steps=num_steps)
    assert dict(zip(ranks, codes(*ranks.values()), strict=True)) == dict.fromkeys(IN_TIME, 0)
    for name in IN_TIME:
        assert said(tmp_path / name, 0) == "", name
        assert not (tmp_path / name / "stacks").exists(), name


def stand_without_last_resort(run_dir: Path) -> None:
    """In a host that has no room for another process."""
    sys.executable = str(run_dir / "missing")
    stand(run_dir, 0, 1, 2, ((Phase.COMPUTING, 0, MUCH_LATER),), SOON)


def test_a_rank_whose_last_resort_cannot_be_started_is_still_ended(tmp_path: Path) -> None:
    process = forks().Process(target=stand_without_last_resort, args=(tmp_path,))
    process.start()
    assert codes(process) == [74], said(tmp_path, 0)
    lines = said(tmp_path, 0).splitlines()
    assert len(lines) == 2, lines
    assert "warning: this rank has no last resort (No such file or directory)" in lines[0]
    assert "the run hangs: rank 0 of 1" in lines[1]


def test_it_is_off_at_0(tmp_path: Path) -> None:
    off = HangConfig(step_seconds=0)
    assert codes(start(tmp_path, (Phase.COMPUTING, 0, 3 * SOON.step_seconds), config=off)) == [0]
    assert not (tmp_path / "heartbeats").exists()


@pytest.mark.long
def test_a_rank_may_wait_for_one_that_saves(tmp_path: Path) -> None:
    """Rank 0 deletes old checkpoints while the others are in the next step."""
    saving = start(tmp_path, (Phase.SAVING, 0, LONG), (Phase.COMPUTING, 0, 0.4), num_ranks=2)
    waiting = start(tmp_path, (Phase.COMPUTING, 0, LONG + 0.3), rank=1, num_ranks=2)
    assert codes(saving, waiting) == [0, 0], said(tmp_path, 0, 1)


@pytest.mark.long
def test_storage_that_does_not_answer_ends_no_rank_that_trains(tmp_path: Path) -> None:
    """Such as the run directory's file server, on one host, while the data and the checkpoints are elsewhere."""
    (tmp_path / "heartbeats").mkdir()
    os.mkfifo(tmp_path / "heartbeats" / "rank-00000.json.part")  # opening it for writing waits for a reader
    training = tuple((Phase.COMPUTING, 0, LIMIT_SECONDS / 4) for _ in range(10))
    assert codes(start(tmp_path, *training)) == [0], said(tmp_path, 0)
    warning = f"warning: the disk or file server of {tmp_path}/heartbeats has not answered for"
    assert said(tmp_path, 0).count(warning) == 1


def test_a_rank_that_hangs_blames_a_disk_that_does_not_answer(tmp_path: Path) -> None:
    (tmp_path / "heartbeats").mkdir()
    os.mkfifo(tmp_path / "heartbeats" / "rank-00000.json.part")
    assert codes(start(tmp_path, (Phase.COMPUTING, 0, MUCH_LATER), config=SOON)) == [74]
    error = f"error: the disk or file server of {tmp_path}/heartbeats has not answered for"
    assert error in said(tmp_path, 0)
    call = f"openat of {tmp_path}/heartbeats/rank-00000.json.part"
    assert f" s ({call}), so the run hangs: rank 0 of 1 on host " in said(tmp_path, 0)


def stand_beside_stopped_writer(run_dir: Path) -> None:
    with (run_dir / "said-0").open("wb") as said:
        os.dup2(said.fileno(), 2)
    progress, path = RankProgress(), run_dir / "heartbeats" / "rank-00000.json"
    progress.attempt, progress.stopped_writer = "0001-abc", lambda: 4711
    deadline, pause = time.monotonic() + MUCH_LATER, threading.Event()
    with Heartbeat(run_dir, HANG, progress, world=one_world(port=1)):
        while not path.exists() or "4711" not in path.read_text():
            assert time.monotonic() < deadline
            progress.step_begins(1)
            pause.wait(0.05)
        shutil.copy(path, run_dir / "seen")


def test_a_checkpoint_writer_that_is_stopped_is_named(tmp_path: Path) -> None:
    process = forks().Process(target=stand_beside_stopped_writer, args=(tmp_path,))
    process.start()
    assert codes(process) == [0]
    beat = json.loads((tmp_path / "seen").read_text())
    trouble = f"{beat['trouble']}; {beat['todo']}"
    assert trouble.startswith("the checkpoint writer (process 4711 on ")
    assert trouble.endswith("is stopped, as by SIGSTOP, and writes no checkpoint; `kill -CONT 4711` there continues it")
    assert said(tmp_path, 0).count(f"warning: {trouble}") == 1


def stand_rewound(run_dir: Path, rank: int, phase: Phase, seconds: float) -> None:
    """One of two ranks, which goes back to a checkpoint, under a new attempt, and then stays at a place."""
    with (run_dir / f"said-{rank}").open("wb") as said:
        os.dup2(said.fileno(), 2)
    progress, pause = RankProgress(), threading.Event()
    progress.attempt = "0001-abc"
    with Heartbeat(run_dir, HANG, progress, world=one_world(rank, 2, port=1)):
        until_all_stand(run_dir, rank, 2)
        for step in (1, 2):
            progress.step_begins(step)
        pause.wait(LIMIT_SECONDS / 2)
        progress.attempt = "0002-def"
        progress.enters(phase)
        pause.wait(seconds)


@pytest.mark.long
def test_the_ranks_hear_each_other_after_a_rewind(tmp_path: Path) -> None:
    stays = (Phase.SAVING, LONG), (Phase.COMPUTING, LONG - 0.3)
    ranks = [forks().Process(target=stand_rewound, args=(tmp_path, rank, *stay)) for rank, stay in enumerate(stays)]
    for process in ranks:
        process.start()
    assert codes(*ranks) == [0, 0], said(tmp_path, 0, 1)


def stand_patiently(run_dir: Path, rank: int, num_ranks: int, stay: Stay) -> None:
    """However late the other ranks write their stacks, they are waited for."""
    heartbeat._GRACE_SECONDS = (MUCH_LATER, MUCH_LATER)
    stand(run_dir, rank, num_ranks, 2, (stay,), HANG)


def test_one_rank_says_which_one_the_others_wait_for(tmp_path: Path) -> None:
    stays = [
        (Phase.COMPUTING, 0, MUCH_LATER),
        (Phase.COMPUTING, 0, MUCH_LATER),
        (Phase.WAITING_FOR_DATA, 0, MUCH_LATER),
    ]
    ranks = [forks().Process(target=stand_patiently, args=(tmp_path, rank, 3, stay)) for rank, stay in enumerate(stays)]
    for process in ranks:
        process.start()
    assert codes(*ranks) == [74, 74, 74]
    message = said(tmp_path, 0, 1, 2)
    assert message.count("the run hangs: rank 2 of 3 on host ") == message.count("error: ") == 1, message
    assert "in step 2, waiting for data; the others wait for it in step 2, forward and backward" in message
    assert len(list((tmp_path / "stacks").iterdir())) == 3


def test_time_in_which_the_process_is_stopped_does_not_count(tmp_path: Path) -> None:
    """Nor does it for the process beside it."""
    process = start(tmp_path, (Phase.COMPUTING, 0, 0.6 * LIMIT_SECONDS), config=HANG)
    path = tmp_path / "heartbeats" / "rank-00000.json"
    deadline = time.monotonic() + MUCH_LATER
    while not path.exists() and time.monotonic() < deadline:
        threading.Event().wait(0.01)
    assert process.pid
    os.kill(process.pid, signal.SIGSTOP)
    assert not threading.Event().wait(2.5 * LIMIT_SECONDS)
    os.kill(process.pid, signal.SIGCONT)
    assert codes(process) == [0], said(tmp_path, 0)
    assert json.loads(path.read_text())["phase"] == "ended"


def test_the_exit_code_is_that_of_the_command_line() -> None:
    assert exit_codes.CRASH == heartbeat._RETRY
