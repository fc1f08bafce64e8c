"""Pauses, budget and deadline, without a second of waiting."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shards.errors import StorageError, UserError
from shards.storage.retries import Attempts, ReadStoppedError, Retries, RetryConfig, backoff_seconds


@given(failures=st.integers(1, 1000), draw=st.floats(0, 1))
def test_full_jitter_is_anything_up_to_a_doubling_limit(failures: int, draw: float) -> None:
    config = RetryConfig(backoff_seconds=0.2, most_backoff_seconds=10.0)
    limit = min(10.0, 0.2 * 2 ** (failures - 1))
    assert backoff_seconds(failures, config=config, draw=draw) == pytest.approx(draw * limit)


@pytest.mark.parametrize(
    "values", [{"fruitless_attempts": 0}, {"backoff_seconds": -1.0}, {"budget_reserve": -1.0}, {"budget_share": -0.1}]
)
def test_impossible_values_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(UserError, match="fruitless_attempts of 1 or more"):
        RetryConfig(**values)  # type: ignore[arg-type]


class Time:
    """A clock that goes on only by pauses, each the longest there may be."""

    def __init__(self) -> None:
        self.now, self.pauses = 0.0, list[float]()

    def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds

    def attempts(self, retries: Retries) -> Attempts:
        return Attempts("s3://b/x", retries, pause=self.pause, clock=lambda: self.now, draw=lambda: 1.0)


def test_a_storage_that_never_answered_is_given_up_soon() -> None:
    time, retries = Time(), Retries(RetryConfig(fruitless_attempts=4, backoff_seconds=1.0))
    attempts = time.attempts(retries)
    assert [attempts.again_after_failure("refused") for _ in range(4)] == [True, True, True, False]
    assert time.pauses == [1.0, 2.0, 4.0]


def test_a_storage_that_has_answered_is_waited_for_until_the_deadline() -> None:
    time, retries = Time(), Retries(RetryConfig(fruitless_attempts=4, backoff_seconds=1.0, deadline_seconds=60.0))
    retries.has_answered = True
    attempts = time.attempts(retries)
    for _ in range(8):
        assert attempts.again_after_failure("503 SlowDown")
    with pytest.raises(StorageError, match=r"s3://b/x failed 9 times in 55 s.* 503 SlowDown; the deadline is 60 s"):
        attempts.again_after_failure("503 SlowDown")
    assert time.pauses == [1.0, 2.0, 4.0, 8.0, 10.0, 10.0, 10.0, 10.0]


def test_bodies_that_bring_nothing_are_counted_apart() -> None:
    """Many refusals, and then one body that breaks off: no reason to give up."""
    time, retries = Time(), Retries(RetryConfig(fruitless_attempts=2, backoff_seconds=0.001))
    retries.has_answered = True
    attempts = time.attempts(retries)
    for _ in range(10):
        assert attempts.again_after_failure("503")
    assert attempts.again_after_answer("broke off")
    assert not attempts.again_after_answer("broke off")


def test_progress_begins_anew() -> None:
    time, retries = Time(), Retries(RetryConfig(fruitless_attempts=3, backoff_seconds=1.0, deadline_seconds=5.0))
    attempts = time.attempts(retries)
    for _ in range(20):
        attempts.progressed()
        assert attempts.again_after_answer("broke off")
        assert attempts.again_after_answer("broke off")
        assert not attempts.again_after_answer("broke off")
    assert time.pauses == [1.0, 2.0] * 20


def test_a_spent_budget_ends_reads_instead_of_a_storm_of_requests() -> None:
    time, retries = Time(), Retries(RetryConfig(budget_reserve=5.0, budget_share=0.0, backoff_seconds=0.001))
    retries.has_answered = True
    first, second = time.attempts(retries), time.attempts(retries)
    for _ in range(5):
        assert first.again_after_failure("503 SlowDown")
    with pytest.raises(StorageError, match=r"s3://b/x.*503 SlowDown; this process's 5 retries and 0 more .* are spent"):
        second.again_after_failure("503 SlowDown")


@given(num_reads=st.integers(0, 400), reserve=st.integers(1, 20), share=st.sampled_from([0.0, 0.125, 0.5]))
def test_no_more_retries_than_the_budget_has(num_reads: int, reserve: int, share: float) -> None:
    """Whoever retries all the time, each read once, ends with the reserve and a share of the reads."""
    retries = Retries(RetryConfig(budget_reserve=reserve, budget_share=share))
    spent = 0
    for _ in range(num_reads):
        retries.earn(share)
        spent += retries.spend()
    assert spent <= reserve + share * num_reads
    assert spent >= min(num_reads, int(share * num_reads))


def test_retries_travel_to_workers_without_their_lock() -> None:
    retries = pickle.loads(pickle.dumps(Retries(RetryConfig(budget_reserve=7.0))))  # noqa: S301
    assert retries.config.budget_reserve == 7.0
    assert retries.spend()


def test_a_stopped_read_says_what_had_come() -> None:
    assert ReadStoppedError(12).num_bytes == 12
