"""Weights & Biases: one run for all starts of ours, online or, with WANDB_MODE=offline, in files in RUN/wandb.

W&B takes each step once, and only in order. Online, its server says with which step a run continues. Offline, W&B
itself does not resume (a second start of 0.31 begins at step 0): each start writes a file of its own, and the files of
the starts before say which steps they have, and whether something still writes them. Such a file is LevelDB's log:
blocks of 32 KiB with pieces of records, each with a checksum, after a head of 7 bytes. A record is a message of
wandb_internal.proto. The process that writes it may be killed at any byte.
"""

import glob
import json
import struct
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.ranks.world import set_defaults
from pipeline.training.settings.loggers import Line, LoggersConfig, Settings, StartEnding
from shards.errors import UserError
from shards.files.local_files import is_step, open_local_file

if TYPE_CHECKING:
    import wandb

_DEFAULTS = {"WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false"}  # the terminal is ours
_WRITER_SECONDS, _POLL_SECONDS = 30.0, 0.2  # for the process of a killed start to finish its file
_EXIT_CODES = {StartEnding.DONE: 0, StartEnding.STOPPED: 75, StartEnding.FAILED: 1}
_FOLDER = "wandb"
_NOT_ONLINE = ("offline", "dryrun", "disabled")  # by WANDB_MODE
_BLOCK_BYTES = 1 << 15
_MOST_RECORD_BYTES = 1 << 26
_HEAD = struct.Struct("<4sHB")  # of the file
_MAGIC = b":W&B"
_PIECE = struct.Struct("<IHB")  # checksum, length, type
_WHOLE, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def prepare() -> None:
    """Loads the library."""
    set_defaults(_DEFAULTS)
    try:
        import wandb  # noqa: F401, PLC0415 - an extra
    except ImportError as error:
        raise UserError(
            f"wandb cannot be loaded ({error}); install it again: pip install 'patchline[wandb]'"
        ) from error


class WandbLogger:
    """A `Logger`. `identity` is the run's for good, `name` is for people."""

    title = "W&B"

    def __init__(self, config: LoggersConfig, *, identity: str, name: str, run_dir: Path) -> None:
        self._config, self._identity, self._name = config, identity, name
        self._run_dir = run_dir
        self._run: wandb.Run
        self._opened_step = 0

    def open(self) -> int:
        """Continues the run with our id, or begins it. The files of earlier starts are read first: this one makes
        another."""
        import wandb  # noqa: PLC0415 - an extra

        has_offline = self._last_offline_step()
        settings = wandb.Settings(
            silent=True,
            console="off",  # the terminal is ours
            disable_code=True,
            disable_git=True,
            stop_on_fatal_error=False,
        )
        is_offline = wandb.setup().settings.mode in _NOT_ONLINE
        if not is_offline and not wandb.login(prompt=False, verify=False):
            raise ValueError("no API key: set WANDB_API_KEY, run wandb login, or set WANDB_MODE=offline")
        self._run = wandb.init(
            project=self._config.project,
            name=self._name,
            id=self._identity,
            dir=str(self._run_dir.resolve()),
            resume=None if is_offline else "allow",
            reinit="create_new",
            settings=settings,
        )
        self._opened_step = has_offline if is_offline else max(0, self._run.starting_step - 1)
        return self._opened_step

    def _last_offline_step(self) -> int:
        """The last step in the files of earlier starts, once nothing writes them: W&B's own process outlives a killed
        run."""
        files = sorted((self._run_dir / _FOLDER).glob(f"*run-*-{self._identity}/run-{self._identity}.wandb"))
        deadline, pause = time.monotonic() + _WRITER_SECONDS, threading.Event()
        while busy := [file for file in files if is_open(file)]:
            if time.monotonic() > deadline:
                raise TimeoutError(f"another process is still writing {busy[0]}")
            pause.wait(_POLL_SECONDS)
        return max((last_step(file) for file in files if file.parent.name.startswith("offline-")), default=0)

    def place(self) -> str:
        """The run's page, or what uploads it."""
        if self._run.disabled:
            return "switched off by WANDB_MODE"
        if self._run.offline:
            return f"offline; wandb sync {self._run_dir / _FOLDER} uploads it"
        return str(self._run.url)

    def show_job(self, text: str, settings: Settings) -> None:
        """The settings as the run's configuration, with the job as text beside them."""
        self._run.config.update({**settings, "job": text}, allow_val_change=True)

    def write(self, lines: Sequence[Line]) -> None:
        """Hands the lines to W&B's own process. Values that are added to a step of an earlier start become the run's
        latest, without a point on the curve."""
        for line in lines:
            if line.is_added and line.step <= self._opened_step:
                self._run.summary.update(dict(line.values))
            else:
                self._run.log(dict(line.values), step=line.step)

    def close(self, ending: StartEnding) -> None:
        """The run's state, as W&B shows it: finished, preempted or failed."""
        if ending is StartEnding.STOPPED:
            self._run.mark_preempting()
        self._run.finish(exit_code=_EXIT_CODES[ending])


def last_step(path: Path) -> int:
    """The last step in a file of W&B; 0 if there is none."""
    from google.protobuf.message import DecodeError  # noqa: PLC0415 - only for files of W&B
    from wandb.proto.wandb_internal_pb2 import Record  # noqa: PLC0415 - an extra

    last = 0
    with open_local_file(path) as file:
        for data in _records(file):
            with suppress(DecodeError, ValueError):  # it is as it was written, but by another hand
                record = Record.FromString(data)
                if record.HasField("history"):
                    last = max(last, _step_of(record.history))
    return last


def is_open(path: Path) -> bool:
    """Whether a process of this user on this host has the file open."""
    wanted = str(path.resolve())
    for link in glob.iglob("/proc/[0-9]*/fd/*"):  # noqa: PTH207 - Path.glob fails at a process that ends meanwhile
        try:
            if str(Path(link).readlink()) == wanted:
                return True
        except OSError:  # it has ended, or is another user's
            continue
    return False


def _step_of(history: Any) -> int:
    """The step of one row; 0 if it has none that makes sense."""
    if history.HasField("step"):
        return int(history.step.num) if is_step(history.step.num) else 0
    for item in history.item:
        if item.key == "_step" or list(item.nested_key) == ["_step"]:
            found = json.loads(item.value_json or "0")
            return int(found) if is_step(found) else 0
    return 0


def _records(file: BufferedReader) -> Iterator[bytes]:
    """All records up to the first byte that is not as it was written."""
    head = file.read(_HEAD.size)
    if len(head) < _HEAD.size or _HEAD.unpack(head)[0] != _MAGIC:
        return
    parts: list[bytes] = []
    for kind, data in _pieces(file):
        parts = [*parts, data] if kind in (_MIDDLE, _LAST) else [data]
        if sum(map(len, parts)) > _MOST_RECORD_BYTES:
            return
        if kind in (_WHOLE, _LAST):
            yield b"".join(parts)


def _pieces(file: BufferedReader) -> Iterator[tuple[int, bytes]]:
    """The pieces of records, each with its type."""
    while True:
        left = _BLOCK_BYTES - file.tell() % _BLOCK_BYTES
        if left < _PIECE.size:
            file.read(left)  # a block ends with zeros
            continue
        head = file.read(_PIECE.size)
        if len(head) < _PIECE.size:
            return
        checksum, num_bytes, kind = _PIECE.unpack(head)
        data = file.read(num_bytes)
        is_right = zlib.crc32(data, zlib.crc32(bytes([kind]))) == checksum
        if kind not in (_WHOLE, _FIRST, _MIDDLE, _LAST) or len(data) < num_bytes or not is_right:
            return
        yield kind, data
