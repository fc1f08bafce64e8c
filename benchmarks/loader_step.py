"""A training step's share of the CPU: a thread that multiplies matrices without end beside the loader."""

import threading
import time

SIZE = 256  # a product of this size takes about a millisecond
ALONE_SECONDS = 1.5


class BusyStep:
    """Multiplies matrices in a thread of this process, as a training loop does, with `num_threads` cores."""

    def __init__(self, num_threads: int) -> None:
        self.count = 0
        self._num_threads = num_threads
        self._done, self._has_begun = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "BusyStep":
        self._thread.start()
        self._has_begun.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def rate_alone(self) -> float:
        """Products per second while this process does nothing else."""
        began, count = time.monotonic(), self.count
        time.sleep(ALONE_SECONDS)
        return (self.count - count) / (time.monotonic() - began)

    def _run(self) -> None:
        import torch  # noqa: PLC0415 - an arm loads it only if it needs it

        a, out = torch.rand(SIZE, SIZE), torch.empty(SIZE, SIZE)
        while not self._done.is_set():
            torch.set_num_threads(self._num_threads)  # each time, because FFCV sets it for the whole process
            torch.mm(a, a, out=out)
            self.count += 1
            self._has_begun.set()
