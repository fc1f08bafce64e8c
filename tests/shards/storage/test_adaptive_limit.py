"""The limit of reads at once falls when the storage says so, at most once a second, and grows while all goes well."""

from shards.storage.adaptive_limit import CUT_SECONDS, AdaptiveLimit


class Clock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_it_is_cut_at_most_once_a_second_and_never_below_one() -> None:
    clock = Clock()
    limit = AdaptiveLimit(8, clock=clock)
    assert (limit.value, limit.was_just_cut()) == (8, False)
    limit.throttled()
    limit.throttled()
    assert (limit.value, limit.was_just_cut()) == (5, True)
    seen = []
    for _ in range(8):
        clock.now += 1.1 * CUT_SECONDS
        assert not limit.was_just_cut()
        limit.throttled()
        seen.append(limit.value)
    assert seen == [3, 2, 1, 1, 1, 1, 1, 1]


def test_it_grows_by_one_for_as_many_successes_as_it_has_reads() -> None:
    limit = AdaptiveLimit(8)
    limit.throttled()
    for _ in range(6):
        limit.ended(is_success=True)
    assert limit.value == 6
    for _ in range(100):
        limit.ended(is_success=False)
    assert limit.value == 6
    for _ in range(100):
        limit.ended(is_success=True)
    assert limit.value == 8


def test_a_success_after_a_throttled_request_is_no_reason_to_grow() -> None:
    limit = AdaptiveLimit(4)
    limit.throttled()
    before = limit._value
    limit.ended(is_success=True)
    assert limit._value == before
    limit.ended(is_success=True)
    assert limit._value > before
