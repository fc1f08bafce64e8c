"""Runs cases in a child process, within a limit on memory, and judges how each ended."""

import logging
import os
import re
import resource
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal

import pyarrow as pa

from pipeline.ranks.world import enter
from shards.errors import UserError
from shards.store import open_store
from tests.fuzz.cases import Case, make_case, prepare
from tests.fuzz.readers import BrokenPromiseError
from tests.fuzz.targets import TARGETS, Target
from tests.fuzz.valid_files import make_valid
from tests.rigs.processes import one_world

CPU_SECONDS = 5.0
MEMORY_BYTES = 1 << 30  # on top of what a process has before its first case; a thread's stack counts with 8 MiB
ROOMS = ("shards", "pipeline", "jobs", "patchline")
CHECKOUT = Path(__file__).resolve().parents[2]
# No reader of a local file may wait for a server.
ENVIRONMENT = {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_EC2_METADATA_DISABLED": "true"}
ENVIRONMENT |= {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "x"}

Kind = Literal["success", "refused", "failed"]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a case ended. `what`: the error's type and its message without names and numbers; of a failure, its type and
    the function of ours that raised it. `detail`: the traceback, or what was printed."""

    kind: Kind
    what: str
    detail: str = ""


def serve(connection: Connection, name: str, root: Path, folder: Path) -> None:
    """Answers each case, or the seed and the number of one, with its outcome, until None comes."""
    target = TARGETS[name]
    os.environ.update(ENVIRONMENT)
    folder.mkdir(parents=True, exist_ok=True)
    outputs = [_redirect(number, folder / name) for number, name in ((1, "stdout"), (2, "stderr"))]
    logging.getLogger().handlers.clear()
    if target.valid == "training run":
        enter(one_world())
    pa.array([0])  # Arrow takes a gigabyte of addresses at its first allocation
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    most = _data_bytes() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    while (item := connection.recv()) is not None:
        case = item if isinstance(item, Case) else make_case(target, root / target.valid, seed=item[0], number=item[1])
        connection.send(_outcome(case, target, root / target.valid, folder / "case", outputs))
    os._exit(0)


def make_files(root: Path) -> None:
    """The valid files of all targets, in a process of their own."""
    enter(one_world())
    make_valid(root, one_world())


def _outcome(case: Case, target: Target, valid: Path, folder: Path, outputs: list[Path]) -> Outcome:
    for path in outputs:
        os.truncate(path, 0)
    for beside in (f"{folder}-index", f"{folder}-packed"):
        _remove(Path(beside))
    prepare(case, valid, folder)
    open_store.cache_clear()
    began = time.process_time()
    outcome = _read(case, target, folder)
    seconds = time.process_time() - began
    printed, errors = (path.read_text(errors="replace") for path in outputs)
    if seconds > CPU_SECONDS:
        return Outcome(kind="failed", what=f"slow, then {outcome.what}", detail=f"{seconds:.0f} s\n{outcome.detail}")
    if printed:
        return Outcome(kind="failed", what="prints", detail=printed[:1000])
    if "Traceback (most recent" in errors:
        return Outcome(kind="failed", what=f"a traceback on stderr, then {outcome.what}", detail=errors[:4000])
    return outcome


def _read(case: Case, target: Target, folder: Path) -> Outcome:
    try:
        what = target.ways[case.way](folder)
    except Exception as error:
        if isinstance(error, (UserError, *target.may_raise)):
            return Outcome(kind="refused", what=f"{type(error).__name__}: {_words(str(error), folder)}")
        what = (
            _words(str(error), folder)
            if isinstance(error, BrokenPromiseError)
            else f"{type(error).__name__} in {_place(error)}"
        )
        return Outcome(kind="failed", what=what, detail=_short("".join(traceback.format_exception(error))))
    return Outcome(kind="success", what=what or "read")


def _place(error: BaseException) -> str:
    """The innermost function of ours that the error went through."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(str(CHECKOUT))]
    own = [frame for frame in frames if Path(frame.filename).relative_to(CHECKOUT).parts[0] in ROOMS]
    last = (own or frames)[-1]
    return f"{Path(last.filename).relative_to(CHECKOUT)}:{last.name}"


def _words(text: str, folder: Path) -> str:
    """A message without what differs from case to case: paths, values, numbers."""
    text = text.replace(str(folder), "FOLDER").encode("ascii", "replace").decode()
    text = re.sub(r"'[^']*'|\"[^\"]*\"|\[.*\]|\{.*\}", "...", " ".join(text.split()))
    return re.sub(r"\b[0-9a-f]{16,}\b|[\d.]*\d", "N", text)[:120]


def _short(text: str, most: int = 4000) -> str:
    return text if len(text) <= most else f"{text[: most // 2]}\n[...]\n{text[-most // 2 :]}"


def _remove(folder: Path) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()


def _redirect(number: int, path: Path) -> Path:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    os.dup2(file, number)
    return path


def _data_bytes() -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData"))
    return int(line.split()[1]) * 1024
