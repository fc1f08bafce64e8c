"""A read that is left where nobody wants its bytes any more, even while it waits for a storage that says nothing."""

import threading
from collections.abc import Callable
from concurrent.futures import Future

from shards.storage.retries import ReadStoppedError

LOOK_SECONDS = 0.2


def stoppable(read: Callable[[], bytes], stop: threading.Event | None) -> bytes:
    """`read()`; ReadStoppedError soon after `stop` is set. A read that waits for its storage ends by its own timeout,
    in a thread that holds up nobody's end. Without `stop`, no thread is made."""
    if stop is None:
        return read()
    if stop.is_set():
        raise ReadStoppedError(0)
    future: Future[bytes] = Future()
    thread = threading.Thread(target=_run, args=(read, future), name="read-stoppable", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no thread is to be had: better to read without a way to stop than not at all
        return read()
    while not stop.is_set():
        try:
            return future.result(LOOK_SECONDS)
        except TimeoutError:
            if future.done():  # it is the read's own
                raise
    raise ReadStoppedError(0)


def _run(read: Callable[[], bytes], future: Future[bytes]) -> None:
    try:
        future.set_result(read())
    except BaseException as error:
        future.set_exception(error)
