"""Names of fields, and suggestions for misspelt ones."""

import pytest

from jobs.field_names import field_names, known_instead, nested
from jobs.pack import PackJob
from pipeline.training.config import TrainingJob


def test_names_are_dotted_and_those_of_every_choice() -> None:
    names = list(field_names(TrainingJob))
    assert names[:3] == ["run_dir", "data", "data.url"]
    assert "data.augment.min_area" in names
    assert {"source.root", "source.labels_csv", "source.files"} <= set(field_names(PackJob))


@pytest.mark.parametrize(
    ("prefix", "given", "meant"),
    [
        pytest.param("", "stepz", "; did you mean steps?", id="a letter"),
        pytest.param("", "global-batch", "; did you mean global_batch?", id="as a flag"),
        pytest.param("schedule.", "learning_rat", "; did you mean learning_rate?", id="in its group"),
        pytest.param("", "learning_rate", "; did you mean schedule: {learning_rate: ...}?", id="without its group"),
        pytest.param("", "warmup_step", "; did you mean schedule: {warmup_steps: ...}?", id="both"),
        pytest.param("schedule.", "weight_decay", "; did you mean optimizer: {weight_decay: ...}?", id="in another"),
        pytest.param("", "data.augment.flip", "; write it as data: {augment: {flip: ...}}", id="with dots"),
        pytest.param("", "qqqq", "", id="like nothing"),
    ],
)
def test_what_was_meant(prefix: str, given: str, meant: str) -> None:
    assert known_instead(given, prefix, TrainingJob) == meant


def test_a_dotted_name_as_yaml() -> None:
    assert nested("steps") == "steps: ..."
    assert nested("a.b.c") == "a: {b: {c: ...}}"
