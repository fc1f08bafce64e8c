"""The sequence of (step, sample id, sha256 of the augmented pixels) is the same on any ranks and threads, from a folder
and from S3, from any step, and after kills."""

import multiprocessing
import os
import random
import signal
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from tests.rigs.loader import (
    SHARED_MEMORY,
    Record,
    Streaming,
    abandoned,
    kill,
    launch,
    left_behind,
    names_in,
    records,
    records_until,
    wait_for_batch,
)
from tests.rigs.loader_kills import NUM_SAMPLES, copied, killed_often, packed

STEPS = 6  # of 16 samples: past the end of an epoch, 61
PHOTOGRAPHS = "imagenet-sample"


@pytest.fixture(scope="module", params=["generated", pytest.param("photographs", marks=pytest.mark.long)])
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """61 images of one kind, packed into a folder."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "generated":
        return packed(folder)
    found = sorted((request.getfixturevalue("test_data") / PHOTOGRAPHS).glob("*.JPEG"))
    if len(found) < NUM_SAMPLES:
        pytest.skip(f"the test data has no {PHOTOGRAPHS}, or fewer than {NUM_SAMPLES} images in it")
    spread = found[:: len(found) // NUM_SAMPLES][:NUM_SAMPLES]
    return packed(folder, [path.read_bytes() for path in spread])


@pytest.fixture(scope="module", params=[pytest.param(0, id="plain"), pytest.param(2, id="RandAugment")])
def streaming(request: pytest.FixtureRequest, url: str) -> Streaming:
    """The settings of one rank with one thread. RandAugment moves images by up to 100 pixels, so its images are
    large."""
    return Streaming(url=url, num_threads=1, randaugment_ops=request.param, image_size=224 if request.param else 32)


@pytest.fixture(scope="module")
def expected(streaming: Streaming) -> list[Record]:
    """The sequence on one rank with one thread."""
    return records_until(streaming, STEPS)


def of_all_ranks(streaming: Streaming, *, position: dict[str, object] | None = None, stop_step: int) -> list[Record]:
    """The global batches, joined in the order of the ranks; each rank read its own share."""
    parts = [
        records_until(replace(streaming, rank=rank), stop_step, position=position)
        for rank in range(streaming.num_ranks)
    ]
    return [
        Record(
            step=of_step[0].step,
            sample_ids=tuple(sample for part in of_step for sample in part.sample_ids),
            sha256=tuple(digest for part in of_step for digest in part.sha256),
        )
        for of_step in zip(*parts, strict=True)
    ]


def test_the_sequence_is_worth_comparing(expected: list[Record]) -> None:
    """It has each sample of the first epoch once and no picture twice: the second epoch has other crops."""
    assert [record.step for record in expected] == list(range(STEPS))
    samples = sorted(sample for record in expected[:4] for sample in record.sample_ids)
    assert len(samples) == 64
    assert sorted(set(samples)) == list(range(NUM_SAMPLES)), "61 of one epoch and 3 of the next"
    digests = {digest for record in expected for digest in record.sha256}
    assert len(digests) == 16 * STEPS


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_ranks_and_threads_change_nothing(
    streaming: Streaming, expected: list[Record], ranks: int, threads: int
) -> None:
    assert of_all_ranks(replace(streaming, num_ranks=ranks, num_threads=threads), stop_step=STEPS) == expected


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_folder_and_s3_give_the_same(
    streaming: Streaming, expected: list[Record], s3_bucket: str, ranks: int
) -> None:
    remote = copied(streaming.url, f"s3://{s3_bucket}/dataset")
    assert of_all_ranks(replace(streaming, url=remote, num_ranks=ranks, num_threads=4), stop_step=STEPS) == expected


def test_any_step_can_be_the_first(streaming: Streaming) -> None:
    """Also a step that is hundreds of epochs away."""
    ((_, position),) = islice(records(streaming), 1)
    draw = random.Random(7)
    for step in [1, 3, 4, draw.randrange(10, 100), draw.randrange(1000, 10_000)]:
        start, later = ({**position, "next_step": at, "data_step": at} for at in (step, step + 2))
        one = of_all_ranks(streaming, position=start, stop_step=step + 3)
        two = of_all_ranks(replace(streaming, num_ranks=2), position=later, stop_step=step + 3)
        assert [record.step for record in one] == [step, step + 1, step + 2]
        assert one[2:] == two


def test_kills_leave_nothing_and_change_nothing(url: str, s3_bucket: str, tmp_path: Path) -> None:
    """Real processes are killed by SIGKILL at random moments. Each continues from the last position saved before it,
    from a folder and S3 in turn, and the last one with other numbers of ranks and threads."""
    streaming = Streaming(url=url, randaugment_ops=2, image_size=224)
    remote = replace(streaming, url=copied(url, f"s3://{s3_bucket}/dataset"))
    done = killed_often([streaming, remote], num_kills=6, seed=3, folder=tmp_path)
    whole = records_until(streaming, done.stop_step + 2)
    assert [done.by_step[step] for step in range(done.stop_step)] == whole[: done.stop_step]
    assert done.left_behind == []
    assert done.position is not None
    begin = done.position["next_step"]
    for ranks, threads in ((2, 4), (8, 1)):
        other = replace(streaming, num_ranks=ranks, num_threads=threads)
        assert of_all_ranks(other, position=done.position, stop_step=done.stop_step + 2) == whole[begin:]


LITTERER = """
import pathlib, signal, subprocess, sys, tempfile
subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)
tempfile.mkstemp(prefix="left")
pathlib.Path("lock").touch()
print("ready", flush=True)
signal.pause()
"""


def test_the_search_for_what_is_left_finds_it(tmp_path: Path) -> None:
    """A process in its own session, a temporary file, and a lock in the working folder."""
    started = launch(["-c", LITTERER], folder=tmp_path)
    wait_for_batch(started)
    kill(started)
    found = sorted(left_behind(started))
    os.kill(int(found[-1].removeprefix("process ")), signal.SIGKILL)
    assert found[0].startswith("file tmp/left")
    assert found[1] == "file work/lock"
    assert len(found) == 3


def test_a_semaphore_of_a_living_program_is_not_left_behind() -> None:
    """A semaphore of a program that starts its children anew (spawn) keeps its name in /dev/shm until it ends."""
    before = names_in(SHARED_MEMORY)
    forgotten = SHARED_MEMORY / f"patchline-test-{os.getpid()}"
    lock = multiprocessing.get_context("spawn").Lock()
    forgotten.touch()
    try:
        left = abandoned(names_in(SHARED_MEMORY) - before)
    finally:
        forgotten.unlink()
    assert forgotten.name in left
    assert f"sem.{lock._semlock.name.removeprefix('/')}" not in left  # type: ignore[attr-defined]


def test_a_start_that_hangs_is_ended_and_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.rigs.loader.DEADLINE_SECONDS", 5.0)
    program = "import signal\ndef stuck():\n signal.pause()\nstuck()"
    hanging = launch(["-X", "faulthandler", "-c", program], folder=tmp_path)
    with pytest.raises(TimeoutError, match=r"(?s)no batch in 5 s.*in stuck"):
        wait_for_batch(hanging)
    assert hanging.process.returncode == -signal.SIGABRT
