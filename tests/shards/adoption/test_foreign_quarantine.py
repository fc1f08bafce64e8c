"""When labels must be integers, and which reason the message gives."""

import logging

import pyarrow as pa
import pytest

from shards.adoption.adopt import are_mostly_integers, commonest_reason
from shards.adoption.foreign_tar import TarLabels


def labels_of(num_labels: int, num_integers: int) -> TarLabels:
    return TarLabels(
        num_fit=num_labels,
        num_refused=0,
        labels=(),
        num_labels=num_labels,
        num_integers=num_integers,
        num_odd=num_labels - num_integers,
        integers=(),
    )


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ([(3, 3), (4, 4)], False),  # nothing to refuse
        ([(3, 0), (4, 4)], True),
        ([(4, 0), (4, 4)], False),  # not more than half
        ([(5, 0)], False),
        ([(0, 0)], False),
        ([], False),
    ],
)
def test_the_majority_of_all_tars_decides(
    counts: list[tuple[int, int]], expected: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert are_mostly_integers([labels_of(*pair) for pair in counts]) == expected
    assert bool(caplog.records) == expected


@pytest.mark.parametrize(
    ("reasons", "expected"),
    [
        ([None, "empty file"], "empty file"),
        (
            ["empty file", "empty file", "unknown label 'a'", "unknown label 'b'", "unknown label 'c'"],
            "unknown label 'a'",
        ),
        (["no label: its .cls is not UTF-8", "no label: b", "no label: b", "empty file"], "no label: b"),
    ],
)
def test_the_commonest_reason(reasons: list[str | None], expected: str) -> None:
    causes = [reason and reason.upper() for reason in reasons]
    columns = {"reason": pa.array(reasons, pa.string()), "cause": pa.array(causes, pa.string())}
    assert commonest_reason(pa.table(columns)) == (expected, expected.upper())
