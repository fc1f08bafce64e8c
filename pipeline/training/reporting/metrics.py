"""Writes metrics.jsonl (one JSON object per line, with `step` and `loss`) and TensorBoard's curves, on rank 0."""

import errno
import json
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch

from pipeline.shared_settings import METRICS_FILE
from shards.files.local_files import (
    MOST_LINE_BYTES,
    KeptWrites,
    Line,
    append_to,
    each_line,
    is_step,
    naming,
    object_in,
    open_to_append,
    open_to_change,
    read_lines,
    replacing,
    write_all,
)
from shards.files.looks import is_there, patiently

log = logging.getLogger(__name__)
_END, _COMMA = b"}\n", b", "  # of equal length
# TensorBoard sorts groups and cards by name. These names make it open on the loss, with the scores below and counters
# last.
_TRAIN = {"loss": "loss", "learning_rate": "lr", "epoch": "num_epochs", "grad_norm": "total_grad_norm"}
_SCORES = ("accuracy", "loss", "top5", "mean_per_class", "calibration_error", "chance")
_TAGS = {name: f"train/{shown}" for name, shown in _TRAIN.items()}
_TAGS |= {f"test_{name}": f"val/{name}" for name in _SCORES}
_TAGS |= {f"test_ema_{name}": f"val/ema/{name}" for name in _SCORES}
_TAGS |= {name: f"work/perf/{name}" for name in ("images_per_second", "step_seconds", "data_wait_share")}
_NORMS = ("grad_norm", "param_norm")
_GROUPS = {"eval": "val", "fewshot": "val/fewshot"} | {name: f"weights/{name}" for name in _NORMS}
_COLUMNS, _GAP = 4, 2  # columns of the grid of images, and its gaps in pixels


class Metrics:
    """A run's curves. When it is opened at `step`, it removes what an earlier start wrote for later steps. Lines for
    which the disk has no room are written later."""

    def __init__(self, run_dir: Path, *, step: int) -> None:
        self._path = run_dir / METRICS_FILE
        # Imported here, because TensorBoard takes half a second to load and only rank 0 writes curves.
        from pipeline.training.reporting.board import Board  # noqa: PLC0415

        cut_after(self._path, step=step)
        self._file: BinaryIO | None = open_to_append(self._path)
        self._writes = KeptWrites(self._path)
        try:
            self._board = Board(run_dir, first_step=step + 1)
        except BaseException:
            self._close_file()
            raise

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Writes one line, and one point per curve. Floats can be read back bit for bit."""
        self._writes.do(partial(self._append, {"step": step, **values}))
        self._board.points(step, {tag_of(name): value for name, value in values.items()})

    def show_job(self, text: str, settings: Mapping[str, str | int | float]) -> None:
        """Shows the job's YAML, and the settings by which runs are compared. Both go to TensorBoard only."""
        self._board.show_job(text, settings)

    def show_images(self, step: int, images_NHW3: torch.Tensor, names: Sequence[str]) -> None:
        """Shows images, with values of 0 to 255, in a grid of four columns, and their classes in a table of the same
        shape."""
        self._board.picture("work/data/images", grid(images_NHW3), step)
        rows = [names[first : first + _COLUMNS] for first in range(0, len(names), _COLUMNS)]
        table = ["|" + "|".join(" ".join(name.split()).replace("|", "\\|") for name in row) + "|" for row in rows]
        table.insert(1, "|" + "---|" * _COLUMNS)
        self._board.text("work/data/classes", "\n".join(table), step)

    def show_picture(self, tag: str, step: int, picture_HW3: torch.Tensor) -> None:
        """Shows a picture, uint8[height, width, 3] on the host."""
        self._board.picture(tag, picture_HW3, step)

    def amend(self, step: int, values: dict[str, float]) -> None:
        """Adds values to the last line, or appends a line if the last one is not of `step`. Of a value that the line
        has already, both are kept, and readers of JSON take the later one. If the process is killed meanwhile, the file
        has the earlier line or the new one: the values are first written as a line of their own, which is unusable
        until two bytes join it to the last line."""
        if values:
            self._writes.do(partial(self._add_to_last, step, values))
        self._board.points(step, {tag_of(name): value for name, value in values.items()})

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

    def _add_to_last(self, step: int, values: Mapping[str, float]) -> None:
        try:
            file = open_to_change(self._path)
        except FileNotFoundError:
            self._append({"step": step, **values})
            return
        with naming(self._path), file:
            num_bytes = file.seek(0, os.SEEK_END)
            file.seek(max(0, num_bytes - MOST_LINE_BYTES))
            data = file.read(MOST_LINE_BYTES)
            text = data[data.rfind(b"\n", 0, -1) + 1 :]
            last = object_in(text) if text.endswith(_END) else None
            if last is None or last.get("step") != step:
                self._append({"step": step, **values})
                return
            self._close_file()
            try:
                write_all(file, json.dumps(values)[1:].encode() + b"\n")
            except OSError:
                with suppress(OSError):
                    file.truncate(num_bytes)
                raise
            file.seek(num_bytes - len(_END))
            file.write(_COMMA)  # joins both lines

    def _close_file(self) -> None:
        """Closes the file; the next line opens it again. Errors are ignored, because writing the line raised them
        already."""
        file, self._file = self._file, None
        if file:
            with suppress(OSError):
                file.close()

    def close(self) -> None:
        """Flushes and closes metrics.jsonl and TensorBoard's file."""
        self._close_file()
        self._board.close()


def tag_of(name: str) -> str:
    """Returns TensorBoard's name for a value of metrics.jsonl, in one of the groups train, val, weights and work."""
    group, slash, rest = name.partition("/")
    if slash and group in _GROUPS:
        return f"{_GROUPS[group]}/{rest}"
    return _TAGS.get(name) or f"work/{name}"


def grid(images_NHW3: torch.Tensor) -> torch.Tensor:
    """Returns one picture, uint8[height, width, 3], of the images in rows of four with white gaps."""
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
    """Drops the lines of steps above `step`, and unusable lines, such as a half-written last one. If all of them are at
    the end, as usual, the file is cut there, and nothing is copied."""
    if not is_there(path):
        return
    end, num_unusable, is_beginning = patiently(path, lambda: _up_to(path, step))
    with naming(path):
        if is_beginning:
            os.truncate(path, end)
        else:
            patiently(path, lambda: _copy_up_to(path, step))
    if num_unusable:
        log.warning("%s: dropped %d lines that are no lines of metrics", path, num_unusable)


def _up_to(path: Path, step: int) -> tuple[int, int, bool]:
    """Returns where the last line up to `step` ends, the number of unusable lines, and whether the file up to there
    holds only such lines."""
    end, num_unusable, is_beginning = 0, 0, True
    for offset, text, line in each_line(path):
        if line is None or not _is_usable(line):
            num_unusable += 1
        elif line["step"] <= step:
            is_beginning = is_beginning and offset == end and text.endswith(b"\n")
            end = offset + len(text)
    return end, num_unusable, is_beginning


def _copy_up_to(path: Path, step: int) -> None:
    with replacing(path) as waiting, waiting.open("wb") as file:
        for _, text, line in each_line(path):
            if line is not None and _is_usable(line) and line["step"] <= step:
                file.write(text.removesuffix(b"\n") + b"\n")


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Returns every usable line of a run's metrics.jsonl as an object with a `step`. Raises FileNotFoundError if the
    file is missing."""
    path = run_dir / METRICS_FILE
    if not is_there(path):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    return read_lines(path, is_usable=_is_usable).objects


def _is_usable(line: Line) -> bool:
    return is_step(line.get("step"))
