"""Memory for blocks of images, used again and again."""

import mmap
import os
import random
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor

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


def test_the_latest_are_kept_until_it_is_closed() -> None:
    memory = ReusedMemory()
    given_back = freed(memory, MOST_FREE + 2)
    again = [memory.take(1).obj for _ in range(MOST_FREE + 1)]
    assert again[:-1] == given_back[:1:-1]
    assert again[-1] not in given_back
    freed(memory, 1)
    memory.close()
    (late,) = freed(memory, 1)
    assert memory.take(1).obj is not late
    assert not memory._free


def freed(memory: ReusedMemory, count: int) -> list[object]:
    """So many mappings, after they were taken and given back."""
    views = [memory.take(mmap.PAGESIZE) for _ in range(count)]
    mappings: list[object] = [view.obj for view in views]
    del views
    for mapping in mappings:
        memory.give_back(mapping)
    return mappings


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
    freed(memory, 2)
    with pytest.raises(MemoryError, match=f"{1 << 60} bytes for a block of images"):
        memory.take(1 << 60)
    assert not memory._free, "they could have been what is missing"
    assert len(memory.take(1)) == 1


def test_threads_and_forked_children_never_get_memory_that_is_in_use() -> None:
    """Each writes its own byte to what it took, and finds it there when it gives it back."""
    memory, until = ReusedMemory(), time.monotonic() + 1
    children: list[int] = []

    def take_and_give_back(mark: int) -> int:
        draw, kept, count = random.Random(mark), deque[memoryview](maxlen=5), 0
        while time.monotonic() < until:
            view = memory.take(draw.randrange(1, 20 * mmap.PAGESIZE))
            view[0] = view[-1] = mark
            if mark == 1 and len(children) < 5:
                children.append(os.fork())
                if not children[-1]:
                    memory.give_back(memory.take(1).obj)
                    os._exit(0)
            mapping, count = view.obj, count + 1
            if draw.random() < 0.5:
                view.release()
            else:
                kept.append(view)
            memory.give_back(mapping)  # half of them are in use: nobody may get them
            assert all(view[0] == view[-1] == mark for view in kept)
        return count

    with ThreadPoolExecutor(4) as pool:
        assert min(pool.map(take_and_give_back, range(1, 5))) > 100
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 5
