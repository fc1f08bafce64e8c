"""Numbers in a form for people."""

import pytest

from shards.output.quantities import clock, duration, number, percent, plural, share, short_count, short_time, size


@pytest.mark.parametrize(
    ("seconds", "words", "narrow"),
    [
        pytest.param(0.04, "0.0 s", "0:00", id="nothing"),
        pytest.param(9.94, "9.9 s", "0:10", id="tenths"),
        pytest.param(9.96, "10 s", "0:10", id="no tenths"),
        pytest.param(59.6, "1 min 0 s", "1:00", id="rounded up to a minute"),
        pytest.param(151, "2 min 31 s", "2:31", id="minutes"),
        pytest.param(18_725, "5 h 12 min", "5:12:05", id="hours"),
        pytest.param(86_399.7, "1 d 0 h", "1 d 0 h", id="rounded up to a day"),
        pytest.param(277_000, "3 d 4 h", "3 d 4 h", id="days"),
    ],
)
def test_times(seconds: float, words: str, narrow: str) -> None:
    assert (duration(seconds), clock(seconds)) == (words, narrow)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.0, "0 s"), (26.4e-6, "26.4 µs"), (2e-9, "0.002 µs"), (0.0015, "1.5 ms"), (2.0, "2 s"), (1622.4, "1,622 s")],
)
def test_short_times(seconds: float, words: str) -> None:
    assert short_time(seconds) == words


@pytest.mark.parametrize(
    ("num_bytes", "words"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (999.97, "1.0 kB"),
        (999_999, "1.0 MB"),
        (4_449_280, "4.4 MB"),
        (56.5e6, "56.5 MB"),
        (3e12, "3.0 TB"),
    ],
)
def test_sizes(num_bytes: float, words: str) -> None:
    assert size(num_bytes) == words


@pytest.mark.parametrize(
    ("count", "words"),
    [(812, "812"), (807_178, "807 k"), (999_999, "1 M"), (86_567_656, "86.6 M"), (1_200_000_000, "1.2 B")],
)
def test_counts(count: int, words: str) -> None:
    assert short_count(count) == words


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0, "0"),
        (2.03e-05, "2.03e-05"),
        (0.0123, "0.0123"),
        (-3.14159, "-3.142"),
        (1622.4, "1,622"),
        (99_999, "99,999"),
        (99_999.7, "100 k"),
        (-300_000, "-300 k"),
        (3.8e6, "3.8 M"),
        (1.2e15, "1.2e+15"),
    ],
)
def test_numbers(value: float, words: str) -> None:
    assert number(value) == words


@pytest.mark.parametrize(
    ("value", "words"), [(0.0, "0 %"), (0.00012345, "0.0123 %"), (0.9, "90 %"), (1 / 3, "33.3 %"), (-0.5, "-50 %")]
)
def test_percents(value: float, words: str) -> None:
    assert percent(value) == words


@pytest.mark.parametrize(
    ("part", "whole", "words"),
    [
        (0, 9, "0 %"),
        (9, 9, "100 %"),
        (1, 3, "33.3 %"),
        (1, 10**6, "<0.1 %"),
        (9, 1000, "0.9 %"),
        (10, 1000, "1.0 %"),
        (999, 1000, "99.9 %"),
        (10**6 - 1, 10**6, ">99.9 %"),
        (0, 0, "0 %"),
    ],
)
def test_shares(part: int, whole: int, words: str) -> None:
    assert share(part, whole) == words


@pytest.mark.parametrize(
    ("number", "noun", "words"),
    [
        (1, "image", "1 image"),
        (2000, "image", "2,000 images"),
        (0, "class", "0 classes"),
        (18_291, "class", "18,291 classes"),
        (1, "class", "1 class"),
        (4, "micro-batch", "4 micro-batches"),
    ],
)
def test_plurals(number: int, noun: str, words: str) -> None:
    assert plural(number, noun) == words
