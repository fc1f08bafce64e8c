"""When labels must be integers, and which reason the message gives."""

import logging
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from shards.adoption.adopt import are_mostly_integers, commonest_reason, refuse_quarantine
from shards.adoption.foreign_samples import RefusalCause
from shards.adoption.foreign_tar import ADOPTED_SCHEMA, TarFacts, adopted_path
from shards.errors import UserError
from shards.index import table_bytes
from shards.store import open_store


def facts_of(num_labels: int, num_integers: int) -> TarFacts:
    return TarFacts(
        path="a.tar",
        num_bytes=1,
        modified=0,
        sha256="",
        spec_hash="",
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
        assert are_mostly_integers([facts_of(*pair) for pair in counts]) == expected
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


@pytest.mark.parametrize(
    ("cause", "advice"),
    [
        (RefusalCause.NO_IMAGE, ", or give --image-keys, the suffixes of the images"),
        (RefusalCause.NO_LABEL, ", or give --label-key, the label's suffix, or --label-field, a field of .json"),
        (RefusalCause.UNKNOWN_LABEL, ", or give --label-key or --label-field, or another --labels-file"),
        (RefusalCause.NOT_INTEGER, ", or give the names of all classes in --labels-file"),
        (None, ""),
    ],
)
def test_the_cause_decides_what_is_advised(cause: RefusalCause | None, advice: str, tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    rows = [{"source": "a.tar/1.txt", "reason": "odd", "cause": cause}]
    store.write(adopted_path(0), table_bytes(pa.Table.from_pylist(rows, schema=ADOPTED_SCHEMA)))
    facts = [replace(facts_of(0, 0), num_refused=1)]
    with pytest.raises(UserError) as raised:
        refuse_quarantine(facts, store, 0.5, integers_only=False)
    where = f"{tmp_path}/{adopted_path(0)}, of a.tar"
    assert str(raised.value) == (
        f'no sample can be adopted, most often: "odd"; see columns reason and not_integer of {where}{advice}'
    )
