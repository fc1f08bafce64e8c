"""Sources are told apart by their kinds, and depend on their libraries."""

from typing import get_args

import pytest

from shards.sources.kinds import DigitsSource, FolderSource, Source, tool_versions

ALL: list[Source] = [kind() for kind in get_args(Source)]


@pytest.mark.parametrize("source", ALL, ids=lambda source: source.kind)
def test_every_kind_is_an_image_source_of_its_own(source: Source) -> None:
    assert [other.kind for other in ALL].count(source.kind) == 1
    assert source.staged in (True, False)


def test_only_the_digits_depend_on_scikit_learn() -> None:
    assert "scikit-learn" in tool_versions(DigitsSource())
    assert sorted(tool_versions(FolderSource())) == ["numpy", "pillow", "pyarrow"]
