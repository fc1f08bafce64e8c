"""A run whose file server hangs ends with 74, in time, and says which call it waited in, for how long."""

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shards.files.looks import is_there
from shards.storage.local import LocalStore
from tests.rigs.dead_mount import dead_mount, why_no_dead_mount
from tests.rigs.kills import step_at_least, wait_until
from tests.rigs.training import pretrain_words, start

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(why_no_dead_mount()), reason=why_no_dead_mount())]
STEP_SECONDS = 4
WORKS: dict[str, Callable[[LocalStore], object]] = {
    "look": lambda store: is_there(Path(store.url) / "file"),
    "read": lambda store: store.read("file"),
    "list": lambda store: list(store.list("")),
}


@pytest.mark.parametrize("name", WORKS)
def test_a_call_that_waits_on_a_mount_that_is_taken_away_is_repeated(tmp_path: Path, name: str) -> None:
    """The kernel ends it with ECONNABORTED or ENOTCONN, as when a FUSE server is restarted."""
    store, work = LocalStore(str(tmp_path)), WORKS[name]
    (tmp_path / "file").touch()
    with ThreadPoolExecutor(1) as pool:
        with dead_mount(tmp_path):
            found = pool.submit(work, store)
            with pytest.raises(TimeoutError):
                found.result(timeout=0.2)
        assert found.result(timeout=60) == work(store)


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_hung_mount_is_named_in_the_last_words(
    digits_url: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], num_ranks: int
) -> None:
    run_dir = tmp_path / "run"
    more = ("--steps", "1000000", "--checkpoint.every-steps", "1000000", "--hang.step-seconds", str(STEP_SECONDS))
    ranks = start(pretrain_words(digits_url, run_dir, *more), num_ranks=num_ranks, log_dir=tmp_path)
    try:
        assert wait_until(ranks, step_at_least(5), run_dir)
        with dead_mount(run_dir):
            code = ranks.wait()
    finally:
        ranks.kill()
    said = capfd.readouterr().err
    assert code == 74, said
    assert not [rank.returncode for rank in ranks.processes if rank.returncode != 74]
    waited = re.search(
        rf"error: the disk or file server of {run_dir}/heartbeats has not answered for (\d+) s \((.*)\), so ", said
    )
    assert waited, said
    assert int(waited[1]) >= STEP_SECONDS / 2
    assert f"newfstatat of {run_dir}/STOP" in waited[2]
    assert f"the run hangs: rank 0 of {num_ranks} on host " in said
    assert "in request\n" in said, "the stack of its main thread, which cannot be written to the run's folder"
    assert "has run no Python" not in said
