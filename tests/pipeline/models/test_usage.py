"""What config.json says about the use of the weights."""

from dataclasses import asdict

import pytest

from pipeline.evaluation_transform import EvaluationTransform
from pipeline.models.usage import Usage, usage_of
from shards.errors import UserError


def test_what_is_written_is_what_is_read() -> None:
    usage = Usage(loss="sigmoid", transform=EvaluationTransform(mode="central_crop", short_side=604))
    assert usage_of({"usage": asdict(usage)}) == usage


def test_folders_from_before_are_softmax_and_a_plain_resize() -> None:
    assert usage_of({"format": 1}) == Usage(loss="softmax", transform=EvaluationTransform(mode="resize"))


@pytest.mark.parametrize(
    ("said", "message"),
    [
        pytest.param({"loss": "hinge", "transform": {}}, "usage.loss is 'hinge'", id="loss"),
        pytest.param({"transform": {"mode": "tiles"}}, "usage.transform.mode is 'tiles'", id="mode"),
        pytest.param({"transform": {"short_side": "604"}}, "usage.transform.short_side is '604'", id="text"),
        pytest.param({"transform": {}, "colour": 3}, "colour", id="a field of another version"),
    ],
)
def test_what_makes_no_sense_is_refused(said: dict[str, object], message: str) -> None:
    with pytest.raises((UserError, ValueError), match=message):
        usage_of({"usage": said})
