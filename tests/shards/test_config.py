"""Which parts can be asked for."""

import pytest

from shards.config import HeldOutConfig, SubsetConfig
from shards.errors import UserError


def test_what_is_the_whole() -> None:
    assert SubsetConfig().is_whole
    assert SubsetConfig(seed=4).is_whole  # a seed alone chooses nothing
    for one in (SubsetConfig(share=0.5), SubsetConfig(count=1), SubsetConfig(per_class=1), SubsetConfig(first=1)):
        assert not one.is_whole
    assert not SubsetConfig(end=1).is_whole
    assert HeldOutConfig().is_none
    assert not HeldOutConfig(share=0.1).is_none
    assert not HeldOutConfig(count=1).is_none


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"share": 0.0}, r"subset.share is 0.0; allowed: above 0 to 1"),
        ({"share": 1.5}, r"subset.share is 1.5; allowed"),
        ({"share": 0.5, "count": 3}, r"subset.share and subset.count do not go together; give one of them"),
        ({"count": 3, "per_class": 3}, r"subset.count and subset.per_class do not go together"),
        ({"first": 4, "end": 4}, r"subset.end is 4; allowed: more than subset.first, 4, or 0 \(the end\)"),
        ({"count": -1}, r"subset.count is -1; allowed"),
    ],
)
def test_subsets_that_cannot_be(values: dict[str, float], message: str) -> None:
    with pytest.raises(UserError, match=message):
        SubsetConfig(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"share": 1.0}, r"held_out.share is 1.0; allowed: 0 \(none\) to below 1"),
        ({"share": 0.1, "count": 3}, r"held_out.share and held_out.count do not go together"),
    ],
)
def test_held_out_parts_that_cannot_be(values: dict[str, float], message: str) -> None:
    with pytest.raises(UserError, match=message):
        HeldOutConfig(**values)  # type: ignore[arg-type]
