"""Pauses, budget and deadline, without a second of waiting."""

import heapq
import pickle
import random
from functools import partial
from operator import setitem
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shards.errors import StorageError
from shards.storage.retries import ReadStoppedError, RequestRetries, RetryBudget, RetryConfig, backoff_seconds
from shards.storage.s3 import PIECE_BYTES
from shards.store import open_store


@given(failures=st.integers(1, 1000), draw=st.floats(0, 1))
def test_full_jitter_is_anything_up_to_a_doubling_limit(failures: int, draw: float) -> None:
    config = RetryConfig(backoff_seconds=0.2, most_backoff_seconds=10.0)
    limit = min(10.0, 0.2 * 2 ** (failures - 1))
    assert backoff_seconds(failures, config=config, draw=draw) == pytest.approx(draw * limit)


class Time:
    """A clock that goes on only by pauses, each the longest there may be."""

    def __init__(self) -> None:
        self.now, self.pauses = 0.0, list[float]()

    def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds

    def attempts(self, retries: RetryBudget) -> RequestRetries:
        return RequestRetries("s3://b/x", retries, pause=self.pause, clock=lambda: self.now, draw=lambda: 1.0)


def test_a_storage_that_never_answered_is_given_up_soon() -> None:
    time, retries = Time(), RetryBudget(RetryConfig(fruitless_tries=4, backoff_seconds=1.0))
    attempts = time.attempts(retries)
    assert [attempts.again_after_failure("refused", is_answer=False) for _ in range(4)] == [True, True, True, False]
    assert time.pauses == [1.0, 2.0, 4.0]


@pytest.mark.parametrize("who", ["this process", "the batch script"])
def test_a_storage_that_has_answered_is_waited_for_until_the_deadline(
    who: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has heard its answer: a rank that starts while S3 refuses everything need not end, and start again."""
    if who == "the batch script":
        monkeypatch.setattr(RetryBudget, "is_known_to_answer", True)
    time, retries = Time(), RetryBudget(RetryConfig(fruitless_tries=4, backoff_seconds=1.0, deadline_seconds=60.0))
    retries.has_answered |= who == "this process"
    attempts = time.attempts(retries)
    for _ in range(8):
        assert attempts.again_after_failure("503 SlowDown", is_answer=True)
    with pytest.raises(StorageError, match=r"s3://b/x failed 9 times in 55 s.* 503 SlowDown; the deadline is 60 s"):
        attempts.again_after_failure("503 SlowDown", is_answer=True)
    assert time.pauses == [1.0, 2.0, 4.0, 8.0, 10.0, 10.0, 10.0, 10.0]


def test_bodies_that_bring_nothing_are_counted_apart() -> None:
    """Many refusals, and then one body that breaks off: no reason to give up."""
    time, retries = Time(), RetryBudget(RetryConfig(fruitless_tries=2, backoff_seconds=0.001))
    retries.has_answered = True
    attempts = time.attempts(retries)
    for _ in range(10):
        assert attempts.again_after_failure("503", is_answer=True)
    assert attempts.again_after_answer("broke off")
    assert not attempts.again_after_answer("broke off")


def test_a_store_that_has_sent_bytes_before_is_waited_for() -> None:
    """Bodies without a byte, answers with another range: a read that begins in such a minute ends after it."""
    time, retries = Time(), RetryBudget(RetryConfig(fruitless_tries=2, backoff_seconds=1.0, deadline_seconds=60.0))
    retries.has_sent = True
    attempts = time.attempts(retries)
    for _ in range(8):
        assert attempts.again_after_answer("broke off")
    with pytest.raises(StorageError, match="the deadline is 60 s"):
        attempts.again_after_answer("broke off")


def test_progress_begins_anew() -> None:
    time, retries = Time(), RetryBudget(RetryConfig(fruitless_tries=3, backoff_seconds=1.0, deadline_seconds=5.0))
    attempts = time.attempts(retries)
    for _ in range(20):
        attempts.progressed()
        assert attempts.again_after_answer("broke off")
        assert attempts.again_after_answer("broke off")
    assert time.pauses == [1.0, 2.0] * 20
    with pytest.raises(StorageError, match=r"3 times in 3 s, .* the deadline is 5 s"):
        attempts.again_after_answer("broke off")


def test_a_spent_budget_ends_reads_instead_of_a_storm_of_requests() -> None:
    time, retries = Time(), RetryBudget(RetryConfig(budget_reserve=5.0, budget_share=0.0, backoff_seconds=0.001))
    retries.has_answered = True
    first, second = time.attempts(retries), time.attempts(retries)
    for _ in range(5):
        assert first.again_after_failure("503 SlowDown", is_answer=True)
    with pytest.raises(StorageError, match=r"s3://b/x.*503 SlowDown; this process's 5 retries and 0 more .* are spent"):
        second.again_after_failure("503 SlowDown", is_answer=True)


def outage(seconds: float, *, num_reads: int, seed: int, is_answer: bool = False) -> tuple[float, str]:
    """When the last of these reads has its bytes, in a simulation, and the error that ended them before."""
    chance, now = random.Random(seed), [0.0]
    retries = RetryBudget(RetryConfig())
    retries.has_answered = True
    pauses = [0.0] * num_reads
    reads = [
        RequestRetries("x", retries, pause=partial(setitem, pauses, number), clock=lambda: now[0], draw=chance.random)
        for number in range(num_reads)
    ]
    events = [(0.0, number) for number in range(num_reads)]
    while events:
        now[0], number = heapq.heappop(events)
        if now[0] >= seconds:
            continue
        try:
            reads[number].again_after_failure("refused", is_answer=is_answer)
        except StorageError as error:
            return now[0], str(error)
        heapq.heappush(events, (now[0] + pauses[number], number))
    return now[0], ""


def broken_bodies(seconds: float, *, num_bytes: int, seed: int) -> tuple[float, str]:
    """The same of 8 reads, as many as a rank has by default, each of whose bodies breaks off half way."""
    chance, now = random.Random(seed), [0.0]
    retries = RetryBudget(RetryConfig())
    retries.has_answered = True
    pauses, left = [0.0] * 8, [num_bytes] * 8
    reads = [
        RequestRetries("x", retries, pause=partial(setitem, pauses, number), clock=lambda: now[0], draw=chance.random)
        for number in range(8)
    ]
    events = [(0.0, number) for number in range(8)]
    while events:
        now[0], number = heapq.heappop(events)
        if now[0] >= seconds:
            continue
        left[number] -= (arrived := left[number] // 2)
        try:
            if arrived:
                reads[number].progressed(min(1.0, arrived / PIECE_BYTES))
            if not reads[number].again_after_answer("broke off"):
                return now[0], "no byte"
        except StorageError as error:
            return now[0], str(error)
        heapq.heappush(events, (now[0] + pauses[number] + 0.01, number))
    return now[0], ""


@pytest.mark.parametrize("num_bytes", [100_000, 7 << 20], ids=["an index", "a block"])
@pytest.mark.parametrize("seed", range(10))
def test_bodies_that_all_break_off_are_waited_for(num_bytes: int, seed: int) -> None:
    """A minute of it. Each brings some bytes, which neither free a retry nor make the next pause short."""
    ended, error = broken_bodies(60.0, num_bytes=num_bytes, seed=seed)
    assert not error
    assert 60 <= ended <= 70


@pytest.mark.parametrize("seed", range(10))
def test_an_outage_is_waited_for_however_many_reads_are_under_way(seed: int) -> None:
    """Nobody is asked too much where nobody answers."""
    ended, error = outage(60.0, num_reads=24, seed=seed)
    assert not error
    assert 60 <= ended <= 70
    ended, error = outage(600.0, num_reads=24, seed=seed)
    assert "the deadline is 120 s" in error
    assert 100 <= ended <= 120


def given_up(attempts: RequestRetries) -> str:
    """The error with which a read ends that nobody answers."""
    try:
        while attempts.again_after_failure("refused", is_answer=False):
            pass
    except StorageError as error:
        return str(error)
    raise AssertionError("it was given up without the deadline")


def test_reads_that_wait_for_a_connection_give_up_with_the_others() -> None:
    """A stream asks for hundreds of blocks, and reads eight at a time. Each used to wait for two minutes of its own."""
    time, retries = Time(), RetryBudget(RetryConfig())
    retries.has_answered = True
    said = [given_up(time.attempts(retries)) for _ in range(50)]  # one after another
    assert 100 < time.now < 121
    assert "failed 1 times in 0 s, last with: refused; no read has got a byte for 120 s; the deadline is" in said[-1]


@pytest.mark.parametrize("between", ["bytes of another read", "a quiet minute"])
def test_another_outage_is_waited_for_again(between: str) -> None:
    time, retries = Time(), RetryBudget(RetryConfig())
    retries.has_answered = True
    for _ in range(3):
        began = time.now
        assert "the deadline is 120 s" in given_up(time.attempts(retries))
        assert time.now - began > 100
        if between == "bytes of another read":
            retries.silence.received()
        else:
            time.now += 61


def test_an_outage_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    time, retries = Time(), RetryBudget(RetryConfig())
    retries.has_answered = True
    with caplog.at_level("WARNING"):
        for _ in range(3):
            given_up(time.attempts(retries))
    assert caplog.messages == ["s3://b/x cannot be read for a minute now (refused); it is tried for up to 120 s"]


def test_a_storm_of_errors_is_ended_by_the_budget() -> None:
    ended, error = outage(60.0, num_reads=24, seed=0, is_answer=True)
    assert "are spent" in error
    assert ended < 60


def test_a_part_of_progress_frees_a_part_of_a_retry() -> None:
    time, retries = Time(), RetryBudget(RetryConfig(budget_reserve=2.0, budget_share=0.0, backoff_seconds=0.001))
    attempts = time.attempts(retries)
    for _ in range(2):
        assert retries.spend()
    attempts.progressed(0.5)
    with pytest.raises(StorageError, match="spent"):
        attempts.again_after_answer("broke off")
    attempts.progressed(0.5)
    assert attempts.again_after_answer("broke off")


@given(num_reads=st.integers(0, 400), reserve=st.integers(1, 20), share=st.sampled_from([0.0, 0.125, 0.5]))
def test_no_more_retries_than_the_budget_has(num_reads: int, reserve: int, share: float) -> None:
    """Whoever retries all the time, each read once, ends with the reserve and a share of the reads."""
    retries = RetryBudget(RetryConfig(budget_reserve=reserve, budget_share=share))
    spent = 0
    for _ in range(num_reads):
        retries.earn(share)
        spent += retries.spend()
    assert spent <= reserve + share * num_reads
    assert spent >= min(num_reads, int(share * num_reads))


def test_retries_travel_to_workers_without_their_lock() -> None:
    retries = pickle.loads(pickle.dumps(RetryBudget(RetryConfig(budget_reserve=7.0))))  # noqa: S301
    assert retries.config.budget_reserve == 7.0
    assert retries.spend()


def test_a_store_of_a_folder_travels_to_workers(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    assert pickle.loads(pickle.dumps(store)) == store  # noqa: S301


def test_a_stopped_read_says_what_had_come() -> None:
    assert ReadStoppedError(12).num_bytes == 12
