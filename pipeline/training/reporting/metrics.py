"""Writes metrics.jsonl (one JSON object per line, with `step` and `loss`) and TensorBoard's curves, on rank 0."""

import errno
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch

from shards.errors import InvalidDataError
from shards.files.local_files import (
    KeptWrites,
    Line,
    Lines,
    append_to,
    is_step,
    naming,
    object_in,
    open_local_file,
    open_to_append,
    read_lines,
    read_tail,
    replacing,
)
from shards.files.looks import is_there

log = logging.getLogger(__name__)
METRICS_FILE = "metrics.jsonl"
_MOST_LINE_BYTES, _PIECE_BYTES = 1 << 20, 1 << 20
_WRITTEN = re.compile(rb'\{"step": (0|[1-9]\d{0,17})(?:, "[\w/. -]+": (?:-?[\d.]+(?:e[+-]?\d+)?|NaN|-?Infinity))*\}\n')
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
        """Adds values to the last line, or appends a line if the last one is not of `step`. If the process is killed
        meanwhile, the file has the earlier line or the new one."""
        self._writes.do(partial(self._rewrite, step, values))
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

    def _rewrite(self, step: int, values: Mapping[str, float]) -> None:
        self._close_file()
        with naming(self._path), replacing(self._path) as waiting, waiting.open("wb") as file:
            before, num_bytes = _before_last(self._path, step=step)
            _copy_beginning(self._path, file, num_bytes=num_bytes)
            file.write(json.dumps({**before, **values}).encode() + b"\n")

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
    """Drops the lines of steps above `step`, and unusable lines, such as a half-written last one."""
    if not is_there(path):
        return
    end, num_unusable, is_scattered = 0, 0, False  # lines are kept up to `end`; scattered: also some after it
    position, is_cut = 0, False
    for text, found in _each_line(path):
        position += len(text)
        num_unusable += found is None
        if found is None or found > step:
            is_cut = True
        elif is_cut:
            is_scattered = True
        else:
            end = position
    with naming(path):
        if is_scattered:
            with replacing(path) as waiting, waiting.open("wb") as file:
                file.writelines(text for text, found in _each_line(path) if found is not None and found <= step)
        elif is_cut:
            os.truncate(path, end)
        open_to_append(path).close()  # adds the end of the last line, if it is missing
    if num_unusable:
        log.warning("%s: dropped %d lines that are no lines of metrics", path, num_unusable)


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Returns every usable line of a run's metrics.jsonl as an object with a `step`. Raises FileNotFoundError if the
    file is missing."""
    path = run_dir / METRICS_FILE
    if not is_there(path):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    return _lines(path).objects


def _before_last(path: Path, *, step: int) -> tuple[Line, int]:
    """Returns the last usable line if it is of `step`, otherwise a line of only the step, and how many bytes come
    before it. Only the file's end is read, because a run may have ten million lines."""
    tail = read_tail(path, most_bytes=2 * _MOST_LINE_BYTES)
    if tail is None:
        return {"step": step}, 0
    skipped, end = tail.num_bytes - len(tail.data), len(tail.data)
    while end > 0:
        first = tail.data.rfind(b"\n", 0, end) + 1
        line = object_in(tail.data[first:end])
        if line is not None and _is_usable(line) and (first > 0 or skipped == 0):
            return (line, skipped + first) if line["step"] == step else ({"step": step}, skipped + end + 1)
        end = first - 1
    return {"step": step}, skipped


def _copy_beginning(path: Path, file: BinaryIO, *, num_bytes: int) -> None:
    """Copies the first bytes of a file, and ends them with a line break. There are none if the file is missing."""
    if num_bytes == 0:
        return
    with open_local_file(path) as source:
        last = b"\n"
        while num_bytes > 0 and (piece := source.read(min(num_bytes, _PIECE_BYTES))):
            file.write(piece)
            num_bytes, last = num_bytes - len(piece), piece[-1:]
    if last != b"\n":
        file.write(b"\n")


def _each_line(path: Path) -> Iterator[tuple[bytes, int | None]]:
    """Yields each line with its line break, and its step, None if it is unusable. Yields nothing if the file is
    missing. Raises InvalidDataError if it is not a regular file. Only one line is in memory, since a run may have
    millions; those that look as this program writes them are not parsed, which would take 6 us each."""
    try:
        file = open_local_file(path)
    except FileNotFoundError:
        return
    except IsADirectoryError:
        raise InvalidDataError(f"{path} is a folder; move it away, a run writes a file of this name") from None
    except InvalidDataError as error:
        raise InvalidDataError(f"{error}; move it away") from error
    with file:
        while text := file.readline(_MOST_LINE_BYTES):
            is_too_long = len(text) == _MOST_LINE_BYTES and not text.endswith(b"\n")
            while is_too_long and (rest := file.readline(_MOST_LINE_BYTES)) and not rest.endswith(b"\n"):
                pass
            if text == b"\n":
                yield text, 0  # an empty line does no harm
            elif known := None if is_too_long else _WRITTEN.fullmatch(text):
                yield text, int(known[1])
            else:
                line = None if is_too_long else object_in(text)
                yield text, line["step"] if line is not None and _is_usable(line) else None


def _lines(path: Path) -> Lines:
    return read_lines(path, is_usable=_is_usable)


def _is_usable(line: Line) -> bool:
    return is_step(line.get("step"))
