"""What tells one source from another."""

from typing import get_args

import pytest

from shards.sources.entry import ImageSource
from shards.sources.kinds import DigitsSource, FolderSource, Source, source_hash, tool_versions

ALL: list[ImageSource] = [kind() for kind in get_args(Source)]


@pytest.mark.parametrize("source", ALL, ids=lambda source: source.kind)
def test_every_kind_is_an_image_source_of_its_own(source: Source) -> None:
    assert [other.kind for other in ALL].count(source.kind) == 1  # type: ignore[attr-defined]
    assert source.staged in (True, False)


def test_every_setting_is_in_the_hash() -> None:
    hashes = {
        source_hash(DigitsSource()),
        source_hash(DigitsSource(split="test")),
        source_hash(FolderSource(root="a")),
        source_hash(FolderSource(root="b")),
    }
    assert len(hashes) == 4
    assert source_hash(FolderSource(root="a")) == source_hash(FolderSource(root="a"))


def test_only_the_digits_depend_on_scikit_learn() -> None:
    assert "scikit-learn" in tool_versions(DigitsSource())
    assert sorted(tool_versions(FolderSource())) == ["numpy", "pillow", "pyarrow"]
