"""Requests, deadlines and time of a rank, looked at together."""

from pathlib import Path

import pytest

from pipeline.training.ledger import Ledger
from pipeline.training.signals import Signals, StopRequest
from pipeline.training.stopping import Stopping, WaitGivenUpError
from pipeline.training.watch import Watch


@pytest.fixture
def watch(tmp_path: Path) -> Watch:
    return Watch(signals=Signals(tmp_path, watch_markers=True), stopping=Stopping(), ledger=Ledger(tmp_path))


def test_a_commit_fulfils_the_request_to_save_and_is_what_a_stop_leaves(watch: Watch, tmp_path: Path) -> None:
    (tmp_path / "SAVE").touch()
    assert watch.request() == StopRequest.SAVE
    watch.saving()
    watch.saved(7)
    assert watch.request() == StopRequest.NOTHING
    assert watch.stopping.standing().startswith("step 7 is saved")


def test_time_counts_even_where_a_wait_is_given_up(watch: Watch) -> None:
    with pytest.raises(WaitGivenUpError), watch.waiting("data_wait", "waiting for data"):
        raise WaitGivenUpError("waiting for data")
    with watch.writing():
        pass
    seconds = watch.ledger.seconds
    assert seconds["data_wait"] > 0
    assert seconds["checkpoint"] > 0
    assert seconds["compute"] == 0
