"""The curves of a run in TensorBoard, on rank 0. If they cannot be written, training continues without them."""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch

from pipeline.training.zero.loading import without
from shards.files.local_files import naming, read_local_file
from shards.files.looks import Look, is_a_folder, look_once

with without("boto3"):  # with boto3, TensorBoard would write to buckets
    from tensorboard.compat.proto.summary_pb2 import Summary
    from torch.utils.tensorboard import SummaryWriter
    from torch.utils.tensorboard.summary import hparams

log = logging.getLogger(__name__)
_MOST_PICTURE_BYTES = 64 << 20
_FLUSH_SECONDS = 10  # a killed process may lose this much
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 10.0, 600.0  # pauses before another file is opened


class Board:
    """Writes events from `first_step` on. TensorBoard no longer shows what an earlier start wrote for these steps.

    If the file cannot be written, for example because the disk is full, it is closed and a warning is logged once.
    Another file is opened after a pause. Raises OSError only at the start, or if the run directory itself is gone.
    """

    def __init__(self, run_dir: Path, *, first_step: int) -> None:
        self._run_dir, self._first_step = run_dir, first_step
        self._job: tuple[str, Mapping[str, str | int | float]] | None = None
        self._fault, self._opens_at, self._pause_seconds = "", 0.0, _FIRST_PAUSE_SECONDS
        self._hook_before = threading.excepthook
        threading.excepthook = self._thread_failed  # before the writer is made: its thread writes at once
        self._writer: SummaryWriter | None = None
        try:
            with naming(run_dir):
                self._writer = self._opened(first_step)
        except BaseException:
            threading.excepthook = self._hook_before
            raise

    def points(self, step: int, values: Mapping[str, float]) -> None:
        """Adds a point to each curve, in one event. `values`: the points by the curves' names in TensorBoard."""
        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])
        self._write(step, lambda writer: writer._get_file_writer().add_summary(summary, step))  # type: ignore[no-untyped-call]

    def show_job(self, text: str, settings: Mapping[str, str | int | float]) -> None:
        """Shows the job's YAML, and its settings as hyperparameters beside the last values of the curves.

        They are written into the run's own folder (SummaryWriter.add_hparams would make another run), at the first step
        of this process, so that a later start from an earlier step replaces them.
        """
        self._job = text, settings
        self._write(self._first_step, self._show_job)

    def text(self, tag: str, text: str, step: int) -> None:
        """Adds a text in Markdown."""
        self._write(step, lambda writer: writer.add_text(tag, text, step))

    def picture(self, tag: str, picture_HW3: torch.Tensor, step: int) -> None:
        """Adds a picture, uint8[height, width, 3] on the host."""
        pixels = picture_HW3.numpy()
        self._write(step, lambda writer: writer.add_image(tag, pixels, step, dataformats="HWC"))

    def flush(self) -> None:
        """Waits until what was written is in the file."""
        self._write(self._first_step, SummaryWriter.flush)

    def close(self) -> None:
        """Flushes and closes the file."""
        try:
            writer, self._writer = self._writer, None
            if writer:
                self._guarded(writer.close)
        finally:
            threading.excepthook = self._hook_before

    def _opened(self, step: int) -> SummaryWriter:
        opened = partial(SummaryWriter, str(self._run_dir), purge_step=step, flush_secs=_FLUSH_SECONDS)
        try:
            return opened()
        except FileExistsError:  # os.makedirs also raises this for a folder that it cannot stat
            if not is_a_folder(self._run_dir):
                raise
            return opened()

    def _show_job(self, writer: SummaryWriter) -> None:
        if self._job:
            text, settings = self._job
            shown = dict.fromkeys(("train/loss", "val/accuracy", "val/loss"))
            experiment, session, _ = hparams(dict(settings), shown)  # type: ignore[no-untyped-call]
            writer.add_text("job", f"```yaml\n{text.strip()}\n```", self._first_step)
            for summary in (experiment, session):
                writer._get_file_writer().add_summary(summary, self._first_step)  # type: ignore[no-untyped-call]

    def _write(self, step: int, use: Callable[[SummaryWriter], None]) -> None:
        """Calls `use` with the writer. If there is none, opens another once the pause is over."""
        if self._writer is None and time.monotonic() < self._opens_at:
            return

        def written() -> None:
            if self._writer is None:
                self._writer = self._opened(step)
                self._show_job(self._writer)
                self._writer.flush()
                log.info("TensorBoard's curves are written again from step %d on; metrics.jsonl has those before", step)
                self._fault, self._pause_seconds = "", _FIRST_PAUSE_SECONDS
            use(self._writer)

        self._guarded(written)

    def _guarded(self, write: Callable[[], None]) -> None:
        """Calls `write`. If that fails, closes the file and begins a pause. Raises OSError only if the run directory is
        gone."""
        try:
            with naming(self._run_dir):
                write()
        except OSError as error:
            if look_once(self._run_dir) is Look.MISSING:
                raise
            if not self._fault:
                log.warning(
                    "TensorBoard's curves cannot be written (%s); training continues, and metrics.jsonl has them",
                    error.strerror or error,
                )
            self._fault = str(error)
            writer, self._writer = self._writer, None
            self._opens_at = time.monotonic() + self._pause_seconds
            self._pause_seconds = min(2 * self._pause_seconds, _LONGEST_PAUSE_SECONDS)
            if writer:
                with suppress(OSError):
                    writer.close()

    def _thread_failed(self, failed: threading.ExceptHookArgs) -> None:
        """Suppresses the traceback of an OSError in the writer's thread, because the writer raises that error again."""
        is_told = isinstance(failed.exc_value, OSError) and type(failed.thread).__name__ == "_AsyncWriterThread"
        if not is_told:
            self._hook_before(failed)


def show_files(folder: Path, files: Sequence[Path], *, step: int) -> None:
    """Adds PNG files to a TensorBoard folder as pictures, named after the files. They replace what the folder shows
    from `step` on. `folder` must not be one that a run writes to: TensorBoard would follow only the new file."""
    pictures = []
    for path in files:
        data = read_local_file(path, most_bytes=_MOST_PICTURE_BYTES)
        width, height = (int.from_bytes(data[at : at + 4]) for at in (16, 20))  # offsets in IHDR, the first chunk
        image = Summary.Image(width=width, height=height, colorspace=4, encoded_image_string=data)
        pictures.append(Summary.Value(tag=f"weights/inspect/{path.stem}", image=image))
    with naming(folder), SummaryWriter(str(folder), purge_step=step) as board:
        board._get_file_writer().add_summary(Summary(value=pictures), step)
