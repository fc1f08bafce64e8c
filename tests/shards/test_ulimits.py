"""What a shell's limits keep from this process is said in words."""

import errno
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from shards.ulimits import file_size_todo, lack_of_memory, memory_todo, most_file_bytes


@contextmanager
def limited(kind: int, value: int) -> Iterator[None]:
    """The soft limit, until the end of the block."""
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (value, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


def test_limits_are_named_with_their_remedy() -> None:
    assert memory_todo() == "free some memory"
    assert most_file_bytes() is None
    assert file_size_todo() == "its file system takes no larger file; use a folder on another one"
    with limited(resource.RLIMIT_FSIZE, 100_000):
        assert most_file_bytes() == 100_000
        assert file_size_todo() == (
            "this process may write files of at most 100.0 kB (ulimit -f); raise that limit (ulimit -f unlimited)"
        )
    with limited(resource.RLIMIT_AS, 1 << 44):
        assert memory_todo() == (
            "this process may have 17592.2 GB of addresses (ulimit -v); raise that limit (ulimit -v unlimited)"
        )


def caused_by(cause: BaseException) -> ImportError:
    """What NumPy raises: its own error, which quotes the cause in its middle."""
    error = ImportError(f"IMPORTANT: read this\nOriginal error was: {cause}\nmore")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (MemoryError, "memory ran out"),
        (lambda: MemoryError("Unable to allocate 2 GiB"), "Unable to allocate 2 GiB"),
        (lambda: OSError(errno.ENOMEM, "Cannot allocate memory"), "Cannot allocate memory"),
        (lambda: ImportError("libx.so: failed to map segment from shared object"), "libx.so: failed to map segment"),
        (lambda: RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "DefaultCPUAllocator: can't"),
        (lambda: caused_by(ImportError("libx.so: failed to map segment")), "Original error was: libx.so: failed"),
        (lambda: ImportError("no module named x"), ""),
        (lambda: RuntimeError("could not create a primitive"), ""),  # many causes, unless addresses are limited
        (lambda: OSError(errno.EIO, "Input/output error"), ""),
    ],
)
def test_a_lack_of_memory_is_known_in_every_form(make: Callable[[], BaseException], said: str) -> None:
    found = lack_of_memory(make())
    assert found.startswith(said) if said else found == ""


def test_under_a_limit_a_library_that_gives_no_reason_lacks_memory() -> None:
    with limited(resource.RLIMIT_AS, 1 << 44):
        assert lack_of_memory(RuntimeError("could not create a primitive")) == "could not create a primitive"
