"""Real signals to real runs: whatever a run is doing, it ends in time, says once what is saved, and nothing else.

A signal goes to the whole process group, like Ctrl-C in a terminal. Signals and marker files become stop requests, a
thread notices signals at once, and afterwards the handlers are those from before.
"""

import errno
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs import exit_codes
from pipeline.runs.starts import cause_of, left_behind
from pipeline.training.controls import Controls
from pipeline.training.reporting.ledger import Ledger
from pipeline.training.watchdog import stopping
from pipeline.training.watchdog.stopping import Signals, SignalWatcher, Stopping, StopRequest, WaitGivenUpError, say
from tests.rigs.faulty_connection import FaultyProxy
from tests.rigs.hostile import HOSTILE, assert_harmless
from tests.rigs.interrupting import Command, behind_a_proxy, started
from tests.rigs.training import losses, pretrain_words

ANSWER_SECONDS = 60.0  # 10 s, plus what a busy machine takes to exit
LONG = ("--steps", "40000", "--checkpoint.every-steps", "10000", "--engine.precision", "fp32")
ALL = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
WAIT_SECONDS = 60.0


def steps_of(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def assert_quiet(said: str) -> None:
    """No traceback, and no line twice, but for reads of one shard that fail together."""
    assert "Traceback" not in said, said
    assert "Exception" not in said, said
    after_the_time_of_day = (line[9:] for line in said.splitlines())
    lines = [line for line in after_the_time_of_day if not line.startswith("reading s3://")]
    assert len(lines) == len(set(lines)), said


def assert_saved(run_dir: Path, said: str) -> None:
    """Saved at the last completed step."""
    (manifest,) = (run_dir / "checkpoints").glob("step-*/*/MANIFEST.json")
    found = json.loads(manifest.read_text())
    step, steps = found["id"]["step"], found["job"]["job"]["steps"]
    assert step == max(losses(run_dir))
    assert f"saved at step {step} of {steps}; run the same command to continue" in said


def test_the_numbers_are_those_of_the_command_line() -> None:
    codes = (stopping.CONTINUE, stopping.NOTHING_SAVED, stopping.INTERRUPTED)
    assert codes == (exit_codes.CONTINUE, exit_codes.CRASH, exit_codes.INTERRUPTED)


@pytest.mark.slow
def test_the_first_interrupt_saves(digits_url: str, run_dir: Path, tmp_path: Path) -> None:
    with started(tmp_path / "said", *pretrain_words(digits_url, run_dir, *LONG)) as command:
        command.wait_until(lambda: steps_of(run_dir) > 2)
        command.signal(signal.SIGINT)
        assert command.end(seconds=ANSWER_SECONDS) == exit_codes.CONTINUE
    step = max(losses(run_dir))
    assert f"stopping: finishing and saving step {step} (Ctrl-C again ends at once)" in command.said
    assert_saved(run_dir, command.said)
    assert_quiet(command.said)


@pytest.fixture
def stalling(digits_url: str, s3_bucket: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, FaultyProxy]]:
    """The digits in a bucket, behind a proxy that stalls its answers on request."""
    with behind_a_proxy(digits_url, s3_bucket) as (url, proxy):
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        yield url, proxy


def wait_until_stalled(command: Command, proxy: FaultyProxy, run_dir: Path) -> None:
    """Answers are stalled, and no step has been done for five seconds."""
    proxy.rates = {"silence": 1.0}
    command.wait_until(proxy.stalling.is_set)
    seen, since = -1, time.monotonic()

    def stands() -> bool:
        nonlocal seen, since
        now = steps_of(run_dir)
        if now != seen:
            seen, since = now, time.monotonic()
        return time.monotonic() - since > 5

    command.wait_until(stands)


@pytest.mark.slow
def test_a_read_that_stands_still_is_given_up_and_the_run_saved(
    stalling: tuple[str, FaultyProxy], run_dir: Path, tmp_path: Path
) -> None:
    url, proxy = stalling
    words = pretrain_words(url, run_dir, *LONG, "--data.window-blocks", "1")
    with started(tmp_path / "said", *words) as command:
        command.wait_until(lambda: steps_of(run_dir) > 2)
        wait_until_stalled(command, proxy, run_dir)
        command.signal(signal.SIGTERM)
        assert command.end(seconds=ANSWER_SECONDS) == exit_codes.CONTINUE
    assert_saved(run_dir, command.said)
    assert_quiet(command.said)
    left, step = left_behind(run_dir), max(losses(run_dir))
    assert left.step == step, "the step that waited for data had not begun"
    assert cause_of(left, resumed_from=step, attempt_before=left.attempt).kind == "stopped by SIGTERM"


@pytest.mark.slow
def test_a_second_interrupt_ends_at_once(stalling: tuple[str, FaultyProxy], run_dir: Path, tmp_path: Path) -> None:
    url, proxy = stalling
    words = pretrain_words(url, run_dir, *LONG, "--data.window-blocks", "1")
    with started(tmp_path / "said", *words) as command:
        command.wait_until(lambda: steps_of(run_dir) > 2)
        wait_until_stalled(command, proxy, run_dir)
        command.signal(signal.SIGINT)
        command.wait_until_said("Ctrl-C again ends at once")
        command.signal(signal.SIGINT)
        assert command.end(seconds=ANSWER_SECONDS) == exit_codes.INTERRUPTED
    assert "ended at once; nothing has been saved yet; the same command starts from the beginning" in command.said
    assert_quiet(command.said)


@pytest.mark.long
def test_an_evaluation_is_given_up_and_the_run_saved(
    digits_url: str, stalling: tuple[str, FaultyProxy], run_dir: Path, tmp_path: Path
) -> None:
    """The same command resumes it."""
    url, proxy = stalling
    held_out = ("--evaluation.url", url, "--evaluation.every-steps", "3")
    words = pretrain_words(digits_url, run_dir, "--steps", "3", "--engine.precision", "fp32", *held_out)
    with started(tmp_path / "said", *words) as command:
        command.wait_until_said("from scratch")  # the held-out split is open
        proxy.rates = {"silence": 1.0}
        command.wait_until(proxy.stalling.is_set)
        command.wait_until(lambda: steps_of(run_dir) == 2)
        command.signal(signal.SIGINT)
        assert command.end(seconds=ANSWER_SECONDS) == exit_codes.CONTINUE
    assert_saved(run_dir, command.said)
    assert_quiet(command.said)
    proxy.rates = {}
    with started(tmp_path / "again", *words) as command:
        assert command.end() == exit_codes.DONE
    last = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["step"] == 3
    assert {"loss", "test_accuracy", "test_loss"} <= last.keys()
    assert list(losses(run_dir)) == [1, 2, 3]


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_a_first_step_that_compiles_for_ever_ends_in_time(digits_url: str, run_dir: Path, tmp_path: Path) -> None:
    hold, compiler = tmp_path / "hold", tmp_path / "g++"
    compiler.write_text(f'#!/bin/sh\nwhile [ -e {hold} ]; do sleep 0.1; done\nexec g++ "$@"\n')
    compiler.chmod(0o755)
    environ = {"CXX": str(compiler), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    words = pretrain_words(digits_url, run_dir, *LONG, "--engine.compile", "on")
    try:
        with started(tmp_path / "said", *words, environ=environ, is_forked=False) as command:
            command.wait_until_said("compiling the model's blocks")
            hold.touch()
            command.signal(signal.SIGTERM)
            code = command.end(seconds=ANSWER_SECONDS)
    finally:
        hold.unlink(missing_ok=True)
    assert code == exit_codes.CRASH
    assert "nothing has been saved yet; the same command starts from the beginning" in command.said
    assert_quiet(command.said)


@pytest.mark.slow
def test_before_the_first_step_it_ends_at_once(digits_url: str, run_dir: Path, tmp_path: Path) -> None:
    with started(tmp_path / "said", *pretrain_words(digits_url, run_dir, *LONG)) as command:
        command.wait_until((run_dir / "job.yaml").exists)  # DeepSpeed has not been loaded yet
        command.signal(signal.SIGINT)
        assert command.end(seconds=ANSWER_SECONDS) == exit_codes.INTERRUPTED
    assert (
        "stopped before the first step; nothing has been saved yet; the same command starts from the beginning"
        in command.said
    )
    assert_quiet(command.said)
    assert steps_of(run_dir) == 0


def test_a_wait_is_given_up_by_a_rank_that_is_alone_only() -> None:
    for num_ranks, is_given_up in ((1, True), (2, False)):
        with Stopping(num_ranks=num_ranks) as watch:
            watch.step_begins()
            given_up = False
            try:
                with watch.giving_up("waiting for data"):
                    signal.raise_signal(signal.SIGALRM)
            except WaitGivenUpError:
                given_up = True
            assert given_up is is_given_up
            signal.raise_signal(signal.SIGALRM)  # outside the block it has no effect


@pytest.mark.parametrize("number", ALL)
def test_only_a_rank_that_is_alone_may_stop_alone(tmp_path: Path, number: signal.Signals) -> None:
    for num_ranks in (1, 2):
        with Stopping(num_ranks=num_ranks) as watch, Signals(tmp_path, watch_markers=False):
            watch.step_begins(40)
            assert not watch.may_stop_alone
            os.kill(os.getpid(), number)
            deadline = time.monotonic() + WAIT_SECONDS
            while not watch.progress.asked_by and time.monotonic() < deadline:
                time.sleep(0.01)
            assert watch.progress.asked_by == number.name
            assert watch.may_stop_alone is (num_ranks == 1)


def test_everything_is_left_as_it_was() -> None:
    before = signal.getsignal(signal.SIGALRM)
    with Stopping():
        assert signal.getsignal(signal.SIGALRM) != before
    assert signal.getsignal(signal.SIGALRM) == before
    assert "stopping" not in [thread.name for thread in threading.enumerate()]
    assert signal.set_wakeup_fd(-1) == -1


def test_what_is_said_without_a_lock_is_escaped(tmp_path: Path) -> None:
    with (tmp_path / "errors").open("wb") as errors:
        say(f"{HOSTILE} is saved", errors.fileno())
    said = (tmp_path / "errors").read_bytes().decode()
    assert_harmless(said)
    assert said.endswith(" is saved\n")


@pytest.mark.parametrize("number", ALL)
def test_a_signal_asks_for_save_and_exit(tmp_path: Path, number: signal.Signals) -> None:
    with Signals(tmp_path, watch_markers=False) as signals:
        assert signals.request() == StopRequest.NOTHING
        os.kill(os.getpid(), number)
        assert signals.request() == StopRequest.SAVE_AND_EXIT
        signals.saved()
        assert signals.request() == StopRequest.SAVE_AND_EXIT, "a save does not take the exit back"


def test_the_handlers_from_before_are_restored(tmp_path: Path) -> None:
    before = {number: signal.getsignal(number) for number in ALL}
    with Signals(tmp_path, watch_markers=False):
        assert all(signal.getsignal(number) != before[number] for number in ALL)
    assert {number: signal.getsignal(number) for number in ALL} == before


def test_a_signal_that_is_ignored_stays_so(tmp_path: Path) -> None:
    """As with nohup, and in a shell's background jobs."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Signals(tmp_path, watch_markers=False) as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            assert signals.request() == StopRequest.NOTHING
    finally:
        signal.signal(signal.SIGHUP, before)


def test_slurms_warnings_are_heard_even_if_they_were_ignored(tmp_path: Path) -> None:
    """By the shell that starts torchrun, which they would end."""
    before = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    try:
        with Signals(tmp_path, watch_markers=False) as signals:
            os.kill(os.getpid(), signal.SIGUSR2)
            assert signals.request() == StopRequest.SAVE_AND_EXIT
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_handlers_are_restored_after_an_error_too(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGUSR2)
    with pytest.raises(ZeroDivisionError), Signals(tmp_path, watch_markers=False):
        raise ZeroDivisionError
    assert signal.getsignal(signal.SIGUSR2) == before


@pytest.mark.parametrize(
    ("markers", "watch", "expected"),
    [
        pytest.param((), True, StopRequest.NOTHING, id="no marker"),
        pytest.param(("SAVE",), True, StopRequest.SAVE, id="SAVE"),
        pytest.param(("STOP",), True, StopRequest.SAVE_AND_EXIT, id="STOP"),
        pytest.param(("SAVE", "STOP"), True, StopRequest.SAVE_AND_EXIT, id="the higher request of both"),
        pytest.param(("SAVE", "STOP"), False, StopRequest.NOTHING, id="only rank 0 looks at the file system"),
    ],
)
def test_markers(tmp_path: Path, markers: tuple[str, ...], watch: bool, expected: StopRequest) -> None:
    with Signals(tmp_path, watch_markers=watch) as signals:
        for name in markers:
            (tmp_path / name).touch()
        assert signals.request() == expected


def test_a_look_that_fails_is_no_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it end the run, and a request that was seen before is not forgotten."""
    faults, stat = iter([errno.ESTALE, errno.EIO, 0, 0, 0, errno.ESTALE]), Path.stat

    def faulty(self: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        if self.parent == tmp_path and (fault := next(faults, 0)):
            raise OSError(fault, os.strerror(fault), str(self))
        return stat(self, follow_symlinks=follow_symlinks)

    with Signals(tmp_path, watch_markers=True) as signals:
        (tmp_path / "SAVE").touch()
        monkeypatch.setattr(Path, "stat", faulty)
        assert signals.request() == StopRequest.NOTHING
        assert signals.request() == StopRequest.SAVE
        signals.saving()
        assert signals.request() == StopRequest.NOTHING, "the save that runs is the one that SAVE asked for"
        (tmp_path / "STOP").touch()
        assert signals.request() == StopRequest.SAVE_AND_EXIT


def test_a_save_marker_that_a_failing_disk_keeps_is_deleted_after_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unlink, faults = Path.unlink, iter([errno.ESTALE])

    def faulty(self: Path, *, missing_ok: bool = False) -> None:
        if fault := next(faults, 0):
            raise OSError(fault, os.strerror(fault), str(self))
        unlink(self, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", faulty)
    with Signals(tmp_path, watch_markers=True) as signals:
        (tmp_path / "SAVE").touch()
        for is_there in (True, False):
            signals.saving()
            signals.saved()
            assert (tmp_path / "SAVE").exists() == is_there
            assert signals.request() == StopRequest.NOTHING


def test_a_save_fulfils_the_save_marker_alone(tmp_path: Path) -> None:
    with Signals(tmp_path, watch_markers=True) as signals:
        (tmp_path / "SAVE").touch()
        signals.saving()
        assert signals.request() == StopRequest.NOTHING, "until that save has ended"
        signals.saved()
        assert signals.request() == StopRequest.NOTHING
        assert not (tmp_path / "SAVE").exists()
        (tmp_path / "STOP").touch()
        signals.saved()
        assert signals.request() == StopRequest.SAVE_AND_EXIT
        signals.saved()  # a missing SAVE is no error


def test_a_save_marker_that_comes_during_a_save_asks_for_another_one(tmp_path: Path) -> None:
    with Signals(tmp_path, watch_markers=True) as signals:
        signals.saving()
        (tmp_path / "SAVE").touch()
        assert signals.request() == StopRequest.SAVE
        signals.saved()
        assert signals.request() == StopRequest.SAVE


def test_a_save_marker_that_is_repeated_during_its_save_asks_for_another_one(tmp_path: Path) -> None:
    with Signals(tmp_path, watch_markers=True) as signals:
        (tmp_path / "SAVE").touch()
        signals.saving()
        (tmp_path / "SAVE").unlink()
        (tmp_path / "SAVE").touch()
        assert signals.request() == StopRequest.SAVE
        signals.saved()
        assert signals.request() == StopRequest.SAVE
        assert (tmp_path / "SAVE").exists()


def test_a_save_that_fails_leaves_the_save_marker(tmp_path: Path) -> None:
    with Signals(tmp_path, watch_markers=True) as signals:
        (tmp_path / "SAVE").touch()
        signals.saving()
        signals.not_saved()
        assert signals.request() == StopRequest.SAVE


def test_outside_the_main_thread_the_markers_still_work(tmp_path: Path) -> None:
    """Python allows only the main thread to set signal handlers."""
    before, requests = signal.getsignal(signal.SIGUSR2), []
    (tmp_path / "STOP").touch()

    def watch() -> None:
        with Signals(tmp_path, watch_markers=True) as signals:
            requests.append(signals.request())

    thread = threading.Thread(target=watch)
    thread.start()
    thread.join()
    assert requests == [StopRequest.SAVE_AND_EXIT]
    assert signal.getsignal(signal.SIGUSR2) == before


def test_a_save_marker_that_cannot_be_deleted_asks_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "SAVE").mkdir()
    with Signals(tmp_path, watch_markers=True) as signals:
        assert signals.request() == StopRequest.SAVE
        signals.saving()
        signals.saved()
        assert signals.request() == StopRequest.NOTHING
        signals.saving()  # for another reason
        signals.saved()
        assert caplog.text.count("SAVE cannot be deleted") == 1, "the second save has nothing to say of it"
        (tmp_path / "SAVE").rmdir()
        (tmp_path / "other").mkdir()  # which keeps its inode from being used again
        (tmp_path / "SAVE").touch()
        assert signals.request() == StopRequest.SAVE


@pytest.fixture
def controls(tmp_path: Path) -> Controls:
    return Controls(signals=Signals(tmp_path, watch_markers=True), stopping=Stopping(), ledger=Ledger(tmp_path))


def test_a_commit_fulfils_the_request_to_save_and_is_what_a_stop_leaves(controls: Controls, tmp_path: Path) -> None:
    (tmp_path / "SAVE").touch()
    assert controls.request() == StopRequest.SAVE
    controls.signals.saving()
    controls.saved(7)
    assert controls.request() == StopRequest.NOTHING
    assert controls.stopping.standing().startswith("step 7 is saved")


def test_time_counts_even_where_a_wait_is_given_up(controls: Controls) -> None:
    with pytest.raises(WaitGivenUpError), controls.waiting("data_wait", "waiting for data"):
        raise WaitGivenUpError("waiting for data")
    with controls.writing():
        pass
    seconds = controls.ledger.seconds
    assert seconds["data_wait"] > 0
    assert seconds["checkpoint"] > 0
    assert seconds["compute"] == 0


@pytest.fixture
def _handled() -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.usefixtures("_handled")
def test_a_signal_is_noticed_then_time_passes_then_nothing_more() -> None:
    calls: list[bytes] = []
    seen = threading.Event()

    def notice(numbers: bytes) -> float | None:
        calls.append(numbers)
        if not numbers:
            seen.set()
        return 0.01 if numbers else None

    watcher = SignalWatcher(notice, name="test")
    watcher.start()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert seen.wait(WAIT_SECONDS)
    watcher.stop()
    assert calls == [bytes([signal.SIGUSR1]), b""]


@pytest.mark.usefixtures("_handled")
def test_the_descriptor_of_before_is_set_again() -> None:
    read_end, write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    before = signal.set_wakeup_fd(write_end)
    watcher = SignalWatcher(lambda _: None, name="test")
    watcher.start()
    watcher.stop()
    assert signal.set_wakeup_fd(before) == write_end
    os.close(read_end)
    os.close(write_end)


@pytest.mark.usefixtures("_handled")
def test_another_thread_cannot_start_it() -> None:
    errors: list[Exception] = []

    def start() -> None:
        watcher = SignalWatcher(lambda _: None, name="test")
        try:
            watcher.start()
        except ValueError as error:
            errors.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join(WAIT_SECONDS)
    assert "main thread" in str(errors)
