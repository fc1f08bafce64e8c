"""Memory for blocks of images, used again and again."""

import mmap

import pytest

from shards.storage.memory import MOST_FREE, ReusedMemory


def test_what_is_given_back_is_taken_again_at_any_size() -> None:
    memory = ReusedMemory()
    view = memory.take(5 * mmap.PAGESIZE)
    view[:3] = b"abc"
    mapping = view.obj
    view.release()
    memory.give_back(mapping)
    larger = memory.take(9 * mmap.PAGESIZE - 1)
    assert larger.obj is mapping
    assert len(larger) == 9 * mmap.PAGESIZE - 1
    assert bytes(larger[:3]) == b"abc", "its pages are the same"
    larger[-1] = 1
    assert memory.take(1).obj is not mapping


def test_the_nearest_size_is_taken_and_few_are_kept() -> None:
    memory = ReusedMemory()
    views = [memory.take(pages * mmap.PAGESIZE) for pages in range(1, MOST_FREE + 3)]
    mappings = [view.obj for view in views]
    del views
    for mapping in mappings:
        memory.give_back(mapping)
    assert memory.take(3 * mmap.PAGESIZE).obj is mappings[2]
    again = [memory.take(1).obj for _ in range(MOST_FREE)]
    assert [mapping in mappings for mapping in again] == [True] * (MOST_FREE - 1) + [False]


def test_memory_that_is_still_referred_to_is_not_taken_again() -> None:
    memory = ReusedMemory()
    view = memory.take(mmap.PAGESIZE)
    view[0] = 7
    memory.give_back(view.obj)
    other = memory.take(mmap.PAGESIZE)
    assert other.obj is not view.obj
    other[0] = 8
    assert view[0] == 7


def test_what_is_not_its_memory_is_ignored_and_too_much_is_a_memory_error() -> None:
    memory = ReusedMemory()
    memory.give_back(None)
    memory.give_back(b"bytes")
    with pytest.raises(MemoryError, match=f"{1 << 60} bytes for a block of images"):
        memory.take(1 << 60)
    assert len(memory.take(1)) == 1
