"""The bytes of one object by GETs: asked again, continued where a body breaks off, never mixed from two objects."""

import io
import logging
import threading
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from typing import Any

from shards.storage.retries import Attempts, ReadStoppedError, Retries
from shards.storage.s3_client import REQUEST_ERRORS, Body, Fault, ReplacedError, fault_of
from shards.storage.traffic import Traffic, TrafficCounts

log = logging.getLogger(__name__)
PIECE_BYTES = 256 << 10  # fits a processor's cache: botocore copies each piece once more
RESTARTS = 3  # of a range whose object is replaced while it is read


@dataclass(frozen=True, kw_only=True)
class ObjectSource:
    """How an object is asked for: `get` takes what GetObject takes; `errors` makes ours of what `get` raises."""

    name: str  # for messages
    get: Callable[[dict[str, str]], dict[str, Any]]
    request: dict[str, str]
    errors: Callable[[], AbstractContextManager[None]]
    retries: Retries
    traffic: Traffic


class ObjectRead:
    """Bytes first..end-1 of an object, all of it from `first` on where `end` is None. Take them once.

    Raises MissingObjectError, EOFError where the object is shorter, ReplacedError, ReadStoppedError once `stop` is
    set, and StorageError or ConnectionError where the storage does not get well.
    """

    def __init__(
        self, source: ObjectSource, first: int, end: int | None, *, stop: threading.Event | None = None
    ) -> None:
        self._source, self._first, self._end = source, first, end
        self._position, self._etag, self._stop = first, "", stop
        pause = stop.wait if stop else time.sleep
        self._attempts = Attempts(source.name, source.retries, pause=pause)

    def pieces(self) -> Generator[bytes, None, None]:
        """As they arrive, each of at most PIECE_BYTES."""
        for body in self._bodies():
            while piece := body.read(min(PIECE_BYTES, self._left())):
                self._position += len(piece)
                yield piece

    def data(self) -> bytes:
        """All at once. As nobody has seen any of it before, an object that is replaced meanwhile is read anew."""
        for _ in range(RESTARTS):
            try:
                return self._filled()
            except ReplacedError:
                if not self._attempts.again_after_answer("it was replaced while it was read"):
                    raise
                self._count(retries=1)
                self._position, self._etag = self._first, ""
        return self._filled()

    def _filled(self) -> bytes:
        """Read into the memory that becomes the result: BytesIO hands its bytes out without a copy."""
        memory, view = io.BytesIO(), memoryview(b"")
        for body in self._bodies():
            if not view:  # the answer has said that all these bytes are there
                memory.seek(self._position - self._first + self._left() - 1)
                memory.write(b"\0")
                view = memory.getbuffer()
            while count := body.readinto(view[self._position - self._first :][:PIECE_BYTES]):
                self._position += count
                self._check_stop()
        view.release()
        return memory.getvalue()

    def _left(self) -> int:
        return 0 if self._end is None else self._end - self._position

    def _bodies(self) -> Generator[Body, None, None]:
        """One body after another, each from the next byte on, until all bytes are taken."""
        while self._end is None or self._left():
            begun = self._position
            answer = self._answer()
            with closing(Body(answer)) as body:
                if self._is_for_us(answer):
                    yield body
                    if not self._left():
                        return
            self._check_stop()
            self._broke_off(begun)

    def _answer(self) -> dict[str, Any]:
        """A GET from the next byte on, asked again until it is answered."""
        request = dict(self._source.request)
        if self._end is not None:
            request["Range"] = f"bytes={self._position}-{self._end - 1}"
        if self._etag:
            request["IfMatch"] = self._etag
        while True:
            self._check_stop()
            with self._source.errors():
                try:
                    answer = self._source.get(request)
                except REQUEST_ERRORS as error:
                    self._check_stop()
                    fault = fault_of(error)
                    if fault is None or not self._again(fault):
                        raise
                    continue
            self._source.retries.has_answered = True
            return answer

    def _again(self, fault: Fault) -> bool:
        log.info("reading %s failed: %s", self._source.name, fault.name)
        self._count(throttled=int(fault.is_throttle))
        if not self._attempts.again_after_failure(fault.name):
            return False
        self._count(retries=1)
        return True

    def _is_for_us(self, answer: dict[str, Any]) -> bool:
        """Whether the body begins with the next byte. Raises ReplacedError and EOFError."""
        content_range, etag = answer.get("ContentRange", ""), answer["ETag"]
        if self._etag and etag != self._etag:  # a store that ignores If-Match
            raise ReplacedError(f"{self._source.name} was replaced while it was read")
        begins = content_range.split()[-1].partition("-")[0] if content_range else "0"
        if begins != str(self._position):
            return False
        size = int(content_range.rpartition("/")[2] or answer["ContentLength"])
        self._end = size if self._end is None else self._end
        if self._end > size:
            asked = f"bytes {self._first}..{self._end - 1} asked"
            raise EOFError(f"{self._source.name}: {asked}, the object has {size}")
        self._etag = etag
        return True

    def _broke_off(self, begun: int) -> None:
        where = f"{self._source.name} at byte {self._position}"
        log.info("a body of %s broke off", where)
        self._count(broken_bodies=1)
        if self._position - begun >= PIECE_BYTES:
            self._attempts.progressed()
        if not self._attempts.again_after_answer(f"a body that broke off at byte {self._position}"):
            attempts = self._source.retries.config.fruitless_attempts
            raise ConnectionError(f"the body broke off {attempts} times, last in {where}")
        self._count(retries=1)

    def _check_stop(self) -> None:
        if self._stop and self._stop.is_set():
            raise ReadStoppedError(self._position - self._first)

    def _count(self, *, retries: int = 0, broken_bodies: int = 0, throttled: int = 0) -> None:
        self._source.traffic.add(TrafficCounts(retries=retries, broken_bodies=broken_bodies, throttled=throttled))
