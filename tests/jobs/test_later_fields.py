"""Records of older versions replay: tests/jobs/old_records has those of the first that wrote any."""

from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from jobs.later_fields import LATER_FIELDS
from jobs.record import read_record
from jobs.resolve import kind_of

OLD = sorted((Path(__file__).parent / "old_records").glob("*.yaml"))


@pytest.mark.parametrize("path", OLD, ids=lambda path: path.stem)
def test_a_record_of_the_first_version_replays(path: Path) -> None:
    """Where this fails for want of a field, the field is new: add it to LATER_FIELDS."""
    job: Any = read_record(path, stage=path.stem, kind=kind_of(path.stem))
    if path.stem == "pretrain":
        assert (job.data.augment.min_area, job.data.memory_limit_bytes) == (0.6, 4_000_000_000), "not today's recipe"
        assert (job.model.pooling, job.label_smoothing, job.engine.compile) == ("token", 0.0, "auto")


def test_every_later_field_is_one_and_has_a_default() -> None:
    known = {kind.__name__: kind for path in OLD for kind in groups(kind_of(path.stem))}
    for name, later in LATER_FIELDS.items():
        by_name = {field.name: field for field in fields(known[name])}
        for field in later:
            assert (by_name[field].default, by_name[field].default_factory) != (MISSING, MISSING), f"{name}.{field}"


def groups(kind: Any) -> Iterator[Any]:
    """A job's dataclass and all that are inside it."""
    yield kind
    for hint in get_type_hints(kind).values():
        for inner in (hint, *get_args(hint)):
            if is_dataclass(inner):
                yield from groups(inner)
