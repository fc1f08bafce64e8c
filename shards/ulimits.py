"""What this process may take according to its shell's limits (`ulimit`), in words for messages."""

import errno
import resource
from collections.abc import Iterator

from shards.output.quantities import size

_MOST_CAUSES = 8
# Messages of libraries that raise neither MemoryError nor an OSError with ENOMEM: the loader of shared objects, and
# torch.
_NO_MEMORY = ("failed to map segment", "can't allocate memory", "cannot allocate memory")
_PERHAPS_NO_MEMORY = ("could not create a primitive", "bad_alloc")  # oneDNN and C++, if addresses are limited


def has_address_limit() -> bool:
    """Returns whether `ulimit -v` limits the memory of this process."""
    return resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY


def memory_todo() -> str:
    """Returns why this process gets no more memory, as far as its limits tell, and what to do."""
    if not has_address_limit():
        return "free some memory"
    most = resource.getrlimit(resource.RLIMIT_AS)[0]
    return f"this process may have {most / 1e9:.1f} GB of addresses (ulimit -v); raise that limit (ulimit -v unlimited)"


def file_size_todo() -> str:
    """Returns why a file may not be larger, and what to do."""
    most = most_file_bytes()
    if most is None:
        return "its file system takes no larger file; use a folder on another one"
    return f"this process may write files of at most {size(most)} (ulimit -f); raise that limit (ulimit -f unlimited)"


def most_file_bytes() -> int | None:
    """Returns how large a file this process may write; None if it has no limit."""
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return None if most == resource.RLIM_INFINITY else most


def lack_of_memory(error: BaseException) -> str:
    """Returns what an error says about a lack of memory, in one line; empty if it is another error."""
    said = (*_NO_MEMORY, *_PERHAPS_NO_MEMORY) if has_address_limit() else _NO_MEMORY
    for one in _causes(error):
        if isinstance(one, OSError) and one.errno == errno.ENOMEM:
            return f"{one.strerror} at {one.filename}" if one.filename else str(one.strerror)
        if isinstance(one, MemoryError):
            return str(one) or "memory ran out"
        if isinstance(one, ImportError | RuntimeError):
            for line in str(one).splitlines():
                if any(words in line.lower() for words in said):
                    return line.strip()
    return ""


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yields the error and the errors that caused it, at most _MOST_CAUSES in all."""
    one: BaseException | None = error
    for _ in range(_MOST_CAUSES):
        if one is None:
            return
        yield one
        one = one.__cause__ or one.__context__
