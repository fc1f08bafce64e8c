"""Real signals and marker files become stop requests, looked at with deadlines and time; handlers are restored."""

import os
import signal
import threading
from pathlib import Path

import pytest

from pipeline.training.controls import Controls
from pipeline.training.reporting.ledger import Ledger
from pipeline.training.watchdog.stopping import Signals, Stopping, StopRequest, WaitGivenUpError

ALL = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


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
