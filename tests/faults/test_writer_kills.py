"""A writer that dies at any system call of a save leaves the newest committed checkpoint whole; only the save is lost.

Here at three calls in the gate, at every 16th in the long part; `make soak` has every one.
"""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.rigs.training import start
from tests.rigs.writer_kills import Call, losses_after, saving_run, until, words_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace"),
]


def at_three(calls: Sequence[Call]) -> list[Call]:
    """The first write of the rank's file, its fsync, and the rename that commits."""
    return [next(call for call in calls if call[1] == name) for name in ("write", "fsync", "rename")]


def at_every_16th(calls: Sequence[Call]) -> list[Call]:
    """One call in 16, in the order of the threads and of the calls' names."""
    return list(calls[::16])


@pytest.mark.parametrize("chosen", [at_three, pytest.param(at_every_16th, marks=pytest.mark.long)])
def test_a_writer_killed_at_a_call_of_a_save_costs_only_that_save(
    digits_url: str, tmp_path: Path, chosen: Callable[[Sequence[Call]], list[Call]]
) -> None:
    run_dir, log = tmp_path / "run", tmp_path / "trace"
    with saving_run(digits_url, run_dir) as run:
        calls = [call for place in (1, 2) for call in run.calls(place, log)]  # the rank's file, the commit
        assert {"fsync", "rename"} <= {name for _, name, _ in calls}
        assert [call for call in chosen(calls) if not run.kill_at(call, log)] == [], "no kill"
        newest = run.newest()
        until(lambda: len(losses_after(run_dir, newest)) > 5, why="training went on")
    assert run.faults == []

    before = losses_after(run_dir, newest)  # all processes were killed
    ranks = start(words_of(digits_url, run_dir), num_ranks=1, log_dir=tmp_path)
    try:
        until(lambda: losses_after(run_dir, newest).keys() > {newest + 5}, why="the run did not continue")
    finally:
        ranks.kill()
    again = losses_after(run_dir, newest)
    both = sorted(before.keys() & again.keys())[:5]
    assert both, "some steps were done twice"
    assert [before[step] for step in both] == [again[step] for step in both]
