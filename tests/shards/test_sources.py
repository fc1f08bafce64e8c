"""What tells one source from another."""

from shards.sources import DigitsSource, FolderSource, source_hash, tool_versions


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
