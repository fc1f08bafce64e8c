"""metrics.jsonl (one object per line with `step` and `loss`) and TensorBoard, written by rank 0."""

import errno
import json
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch

from pipeline.training.settings.loggers import CurveWriter
from pipeline.training.zero.deepspeed_import import without
from shards.files.json_lines import (
    KeptWrites,
    Line,
    Lines,
    append_to,
    is_step,
    naming,
    open_to_append,
    read_lines,
    write_whole,
)

with without("boto3"):  # of which TensorBoard would write to buckets; a run directory is a folder
    from tensorboard.compat.proto.summary_pb2 import Summary
    from torch.utils.tensorboard import SummaryWriter
    from torch.utils.tensorboard.summary import hparams

log = logging.getLogger(__name__)
METRICS_FILE = "metrics.jsonl"
# TensorBoard sorts groups and cards by name. It is to open on the loss, with the scores below it and counters last.
_TRAIN = {"loss": "loss", "learning_rate": "lr", "epoch": "num_epochs", "grad_norm": "total_grad_norm"}
_SCORES = ("accuracy", "loss", "top5", "mean_per_class", "calibration_error", "chance")
_TAGS = {name: f"train/{shown}" for name, shown in _TRAIN.items()}
_TAGS |= {f"test_{name}": f"val/{name}" for name in _SCORES}
_TAGS |= {f"test_ema_{name}": f"val/ema/{name}" for name in _SCORES}
_TAGS |= {name: f"work/perf/{name}" for name in ("images_per_second", "step_seconds", "data_wait_share")}
_NORMS = ("grad_norm", "param_norm")
_GROUPS = {"eval": "val", "fewshot": "val/fewshot"} | {name: f"weights/{name}" for name in _NORMS}
_OLD_FOLDER = "tensorboard"
_COLUMNS, _GAP = 4, 2  # of the grid of images; the gap in pixels
_FLUSH_SECONDS = 10  # what a killed process may lose


class Metrics:
    """A run's curves. Opened at `step`, it removes what an earlier start wrote for later steps. Lines for which there
    is no room are written later. `follower`: gets all of it, too, once it is written here."""

    def __init__(self, run_dir: Path, *, step: int) -> None:
        self._path = run_dir / METRICS_FILE
        self.follower: CurveWriter | None = None
        cut_after(self._path, step=step)
        self._first_step = step + 1
        self._file: BinaryIO | None = open_to_append(self._path)
        self._writes = KeptWrites(self._path)
        old = run_dir / _OLD_FOLDER  # where earlier versions began the curves
        folder = old if old.is_dir() else run_dir  # TensorBoard calls a run by its folder
        self._hook_before = threading.excepthook
        threading.excepthook = self._thread_failed  # first: the thread writes at once
        try:
            with naming(run_dir):
                self._board = SummaryWriter(str(folder), purge_step=self._first_step, flush_secs=_FLUSH_SECONDS)
        except BaseException:
            self._close_file()
            threading.excepthook = self._hook_before
            raise
        self._events = self._board._get_file_writer()  # type: ignore[no-untyped-call]

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """One line, and one point per curve. Floats read back bit for bit."""
        points = [Summary.Value(tag=tag_of(name), simple_value=value) for name, value in values.items()]
        self._writes.do(partial(self._append, {"step": step, **values}))
        with naming(self._path.parent):
            self._events.add_summary(Summary(value=points), step)  # one event for all of them
        if self.follower:
            self.follower.write(step, values)

    def show_job(self, text: str, settings: Mapping[str, str | int | float]) -> None:
        """The job's YAML, and its settings as hyperparameters beside the last values of the curves.

        Written into the run's own folder (SummaryWriter.add_hparams would make another run), at the first step of this
        process, so that a later start from an earlier step removes it.
        """
        shown = ("train/loss", "val/accuracy", "val/loss")
        experiment, session, _ = hparams(dict(settings), dict.fromkeys(shown))  # type: ignore[no-untyped-call]
        with naming(self._path.parent):
            self._board.add_text("job", f"```yaml\n{text.strip()}\n```", self._first_step)
            for summary in (experiment, session):
                self._events.add_summary(summary, self._first_step)
        if self.follower:
            self.follower.show_job(text, settings)

    def show_images(self, step: int, images_NHW3: torch.Tensor, names: Sequence[str]) -> None:
        """Images of 0 to 255 in a grid of four columns, and their classes in a table of the same shape."""
        self._board.add_image("work/data/images", grid(images_NHW3).numpy(), step, dataformats="HWC")
        rows = [names[first : first + _COLUMNS] for first in range(0, len(names), _COLUMNS)]
        table = ["|" + "|".join(" ".join(name.split()).replace("|", "\\|") for name in row) + "|" for row in rows]
        table.insert(1, "|" + "---|" * _COLUMNS)
        self._board.add_text("work/data/classes", "\n".join(table), step)

    def show_picture(self, tag: str, step: int, picture_HW3: torch.Tensor) -> None:
        """A picture, uint8[height, width, 3] on the host."""
        self._board.add_image(tag, picture_HW3.numpy(), step, dataformats="HWC")

    def amend(self, step: int, values: dict[str, float]) -> None:
        """Adds values to the last line; killed meanwhile, the file has it with them or without them."""
        self._writes.do(partial(self._rewrite, step, values))
        for name, value in values.items():
            self._board.add_scalar(tag_of(name), value, step)
        if self.follower:
            self.follower.amend(step, values)

    def settle(self) -> None:
        """Raises the disk's error if lines are still to be written."""
        self._writes.settle()

    def _append(self, line: Line) -> None:
        with naming(self._path):
            try:
                self._file = self._file or open_to_append(self._path)
                append_to(self._file, line)
            except OSError:
                self._close_file()
                raise

    def _rewrite(self, step: int, values: Mapping[str, float]) -> None:
        lines = _lines(self._path)
        is_there = bool(lines.objects) and lines.objects[-1]["step"] == step
        before = lines.objects[-1] if is_there else {"step": step}
        texts = [*lines.texts[: len(lines.texts) - is_there], json.dumps({**before, **values}).encode()]
        self._close_file()
        write_whole(self._path, b"".join(text + b"\n" for text in texts))

    def _close_file(self) -> None:
        """It is opened again by the next line. What a file server says only now was said of the line, too."""
        file, self._file = self._file, None
        if file:
            with suppress(OSError):
                file.close()

    def close(self) -> None:
        """Flushes and closes both."""
        try:
            self._close_file()
            with naming(self._path.parent):
                self._board.close()
        finally:
            threading.excepthook = self._hook_before

    def _thread_failed(self, failed: threading.ExceptHookArgs) -> None:
        """TensorBoard's writer raises the error of its thread again: no traceback of the thread, too."""
        is_told = isinstance(failed.exc_value, OSError) and type(failed.thread).__name__ == "_AsyncWriterThread"
        if not is_told:
            self._hook_before(failed)


def show_files(folder: Path, files: Sequence[Path], *, step: int) -> None:
    """PNG files as pictures of TensorBoard, by their names, instead of those that the folder has of this step and
    later. Not the folder that a run writes to: TensorBoard would follow the new file alone."""
    pictures = []
    for path in files:
        data = path.read_bytes()
        width, height = (int.from_bytes(data[at : at + 4]) for at in (16, 20))  # of IHDR, the first chunk
        image = Summary.Image(width=width, height=height, colorspace=4, encoded_image_string=data)
        pictures.append(Summary.Value(tag=f"weights/inspect/{path.stem}", image=image))
    with naming(folder), SummaryWriter(str(folder), purge_step=step) as board:
        board._get_file_writer().add_summary(Summary(value=pictures), step)


def tag_of(name: str) -> str:
    """TensorBoard's name of a value of metrics.jsonl: in one of the groups train, val, weights and work."""
    group, slash, rest = name.partition("/")
    if slash and group in _GROUPS:
        return f"{_GROUPS[group]}/{rest}"
    return _TAGS.get(name) or f"work/{name}"


def grid(images_NHW3: torch.Tensor) -> torch.Tensor:
    """uint8[height, width, 3]: the images in rows of four, with white gaps."""
    images = images_NHW3.detach().cpu().float().round().clamp(0, 255).to(torch.uint8)
    number, height, width, _ = images.shape
    columns = min(number, _COLUMNS)
    rows = -(-number // columns)
    whole = torch.full((rows * (height + _GAP) - _GAP, columns * (width + _GAP) - _GAP, 3), 255, dtype=torch.uint8)
    for place, image in enumerate(images):
        top, left = place // columns * (height + _GAP), place % columns * (width + _GAP)
        whole[top : top + height, left : left + width] = image
    return whole


def cut_after(path: Path, *, step: int) -> None:
    """Drops the lines of steps above `step`, and those that are unusable, such as a half-written last line."""
    if not path.exists():
        return
    lines = _lines(path)
    kept = [text for text, line in zip(lines.texts, lines.objects, strict=True) if line["step"] <= step]
    write_whole(path, b"".join(text + b"\n" for text in kept))
    if lines.num_unusable:
        log.warning("%s: dropped %d lines that are no lines of metrics", path, lines.num_unusable)


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Every usable line of a run's metrics.jsonl: an object with its step. FileNotFoundError if there is no file."""
    path = run_dir / METRICS_FILE
    if not path.exists():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    return _lines(path).objects


def _lines(path: Path) -> Lines:
    return read_lines(path, is_usable=_is_usable)


def _is_usable(line: Line) -> bool:
    return is_step(line.get("step"))
