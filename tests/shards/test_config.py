"""Which parts can be asked for."""

from shards.config import HeldOutConfig, SubsetConfig


def test_what_is_the_whole() -> None:
    assert SubsetConfig().is_whole
    assert SubsetConfig(seed=4).is_whole  # a seed alone chooses nothing
    for one in (SubsetConfig(share=0.5), SubsetConfig(count=1), SubsetConfig(per_class=1), SubsetConfig(first=1)):
        assert not one.is_whole
    assert not SubsetConfig(end=1).is_whole
    assert HeldOutConfig().is_none
    assert not HeldOutConfig(share=0.1).is_none
    assert not HeldOutConfig(count=1).is_none
