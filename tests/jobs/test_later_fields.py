"""Records of older versions replay: tests/jobs/old_records has one a stage, of the first version that wrote them."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import yaml

from jobs.recipes.pretrain import digits_smoke
from jobs.record import FORMER_DEFAULTS, LATER_FIELDS, read_record, record_text
from jobs.stages import job_class
from tests.baseline.record import OLD_RUN

OLD = sorted((Path(__file__).parent / "old_records").glob("*.yaml"))


@pytest.mark.parametrize("path", OLD, ids=lambda path: path.stem)
def test_a_record_of_the_first_version_replays(path: Path) -> None:
    """Where this fails for want of a field, the field is new: add it to LATER_FIELDS."""
    job: Any = read_record(path, stage=path.stem, kind=job_class(path.stem))
    if path.stem == "pretrain":
        assert (job.data.augment.min_area, job.data.memory_limit_bytes) == (0.6, 4_000_000_000), "not today's recipe"
        assert (job.model.pooling, job.label_smoothing, job.engine.compile) == ("token", 0.0, "auto")


def test_a_renamed_field_is_read_under_its_former_name() -> None:
    job: Any = read_record(OLD_RUN / "job.yaml", stage="pretrain", kind=job_class("pretrain"))
    assert "average_factor: 0.9" in (OLD_RUN / "job.yaml").read_text()
    assert job.ema_decay == 0.9


def test_a_later_field_keeps_the_meaning_of_the_version_that_wrote_the_record(tmp_path: Path) -> None:
    record = yaml.safe_load(record_text("pretrain", digits_smoke()))
    assert record["job"]["fewshot"].pop("transform") == "fewshot"
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(record))
    job: Any = read_record(tmp_path / "job.yaml", stage="pretrain", kind=job_class("pretrain"))
    assert job.fewshot.transform == "weights"
    named = {kind.__name__: fields(kind) for kind in groups(job_class("pretrain"))}
    for name, values in FORMER_DEFAULTS.items():
        assert set(values) <= set(LATER_FIELDS[name]) <= {field.name for field in named[name]}


def test_later_fields_are_of_classes_that_records_have() -> None:
    known = {kind.__name__ for path in OLD for kind in groups(job_class(path.stem))}
    assert set(LATER_FIELDS) <= known


def groups(kind: Any) -> Iterator[Any]:
    """A job's dataclass and all that are inside it."""
    yield kind
    for hint in get_type_hints(kind).values():
        for inner in (hint, *get_args(hint)):
            if is_dataclass(inner):
                yield from groups(inner)
