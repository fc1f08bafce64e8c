"""Threads that are waited for only so long."""

import threading
import time
from functools import partial

import pytest

from shards.storage.daemons import Daemons, join

SECONDS = 20.0


def wait_for(event: threading.Event) -> None:
    assert event.wait(SECONDS)


def test_they_run_and_are_forgotten_when_they_have_ended() -> None:
    daemons, go = Daemons(), threading.Event()
    assert daemons.start("of-test", partial(wait_for, go))
    (thread,) = daemons.living()
    assert (thread.name, thread.daemon) == ("of-test", True)
    began = time.monotonic()
    join(daemons.living(), 0.05)
    assert time.monotonic() - began < SECONDS / 2
    assert thread.is_alive()
    go.set()
    join(daemons.living(), SECONDS)
    assert not daemons.living()


def test_one_does_not_wait_for_itself() -> None:
    daemons, seen = Daemons(), list[set[threading.Thread]]()
    daemons.start("of-test", lambda: seen.append(daemons.living()))
    join(daemons.living(), SECONDS)
    assert seen == [set()]


def test_a_process_without_threads_to_spare_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    daemons = Daemons()
    assert not daemons.start("of-test", lambda: None)
    assert not daemons.living()
