"""Numbers in a form for people."""

import pytest

from shards.output.quantities import clock, duration, plural, short_count, size


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


@pytest.mark.parametrize(("num_bytes", "words"), [(0, "0 B"), (999, "999 B"), (4_449_280, "4.4 MB"), (3e12, "3.0 TB")])
def test_sizes(num_bytes: int, words: str) -> None:
    assert size(num_bytes) == words


@pytest.mark.parametrize(
    ("number", "words"), [(812, "812"), (807_178, "807 k"), (86_567_656, "86.6 M"), (1_200_000_000, "1.2 B")]
)
def test_counts(number: int, words: str) -> None:
    assert short_count(number) == words


@pytest.mark.parametrize(
    ("number", "noun", "words"),
    [
        (1, "image", "1 image"),
        (2000, "image", "2,000 images"),
        (0, "class", "0 classes"),
        (1, "class", "1 class"),
        (4, "micro-batch", "4 micro-batches"),
    ],
)
def test_plurals(number: int, noun: str, words: str) -> None:
    assert plural(number, noun) == words
