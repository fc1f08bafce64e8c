"""Runs the parts of `patchline doctor --gpu` one after the other and keeps the result of each as soon as it has it.

Each part is a process of its own (several, where GPUs exchange data): one that crashes, hangs or runs out of memory
loses its own result only. The file is written after every part, so a trial that is cut off continues there: parts that
the file has, of the same device and versions, are not measured again.
"""

import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from jobs import exit_codes
from jobs.gpu.page import gpu_page, words_of
from jobs.output import put, write_out
from pipeline.config_values import Device
from pipeline.gpu_parts.sizes import GpuPart, parts_of
from pipeline.ranks.free_port import free_port
from shards.errors import UserError
from shards.files.typed_json import parse_json
from shards.output.quantities import duration, plural
from shards.output.terminal import printable_name

log = logging.getLogger(__name__)
_MOST_FILE_BYTES = 16 << 20
_MOST_SAID = 300
_OTHER_OUT = "give another --out"


def measure(*, device: Device, out: Path, data_url: str, environ: Mapping[str, str]) -> int:
    """Measures every part that `out` lacks, writes it and the page beside it; 1 if a part failed, else 0. UserError if
    there is no GPU to measure, or if `out` is something else."""
    from pipeline.gpu_parts.parts import device_facts  # noqa: PLC0415 - torch, for which other checks do not wait

    about = device_facts(device)
    num_gpus = about["num_gpus"] if about["device"] == "cuda" else 2  # as gloo ranks
    parts = parts_of(about["device"], num_gpus=num_gpus, has_float8=not about["no_float8"], data_url=data_url)
    if about["no_float8"]:
        put(f"no steps in float8: {printable_name(about['no_float8'])}\n")
    kept = _kept(out, about)
    found: dict[str, Any] = {"about": about, "parts": {}}
    began = time.monotonic()
    for number, (name, part) in enumerate(parts.items(), 1):
        old = kept.get(name, {})
        is_kept = old.get("part") == _plain(part) and "result" in old
        entry = old if is_kept else _measured(part, environ)
        found["parts"][name] = entry
        _write(out, found)
        note = " (kept)" if is_kept else f" ({duration(entry['seconds'])})"
        put(f"[{number}/{len(parts)}] {printable_name(f'{name}: {words_of(entry)}')}{note}\n")
    failed = [name for name, entry in found["parts"].items() if "result" not in entry]
    how = f"{plural(len(failed), 'part')} failed: {', '.join(failed)}" if failed else "all parts measured"
    put(f"{how}, in {duration(time.monotonic() - began)}: {out}, {out.with_suffix('.html')}\n")
    return exit_codes.FAULTS_FOUND if failed else exit_codes.DONE


def _plain(part: GpuPart) -> dict[str, Any]:
    """The part as JSON has it."""
    found: dict[str, Any] = json.loads(json.dumps(asdict(part)))
    return found


def _kept(out: Path, about: dict[str, Any]) -> dict[str, Any]:
    """The parts that the file has of this device. UserError if it is no file of this command."""
    if not out.exists():
        return {}
    try:
        if out.stat().st_size > _MOST_FILE_BYTES:
            raise ValueError("it is too large")
        found = parse_json(out.read_bytes())
        parts = found["parts"]
        if not all(isinstance(entry, dict) for entry in parts.values()):
            raise TypeError("a part is no object")
        before, now = ({**each, "no_float8": ""} for each in (found["about"], about))  # torchao may have come
        return dict(parts) if before == now else {}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(f"{out} is no file of `doctor --gpu` ({error}); give another --out") from error


def _measured(part: GpuPart, environ: Mapping[str, str]) -> dict[str, Any]:
    """The part with its result, or why there is none."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="patchline-gpu-") as folder:
        try:
            outcome = {"result": _result(part, Path(folder), environ)}
        except _FailedError as error:
            outcome = {"failed": str(error)}
        return {"part": _plain(part), "seconds": round(time.monotonic() - began, 1)} | outcome


class _FailedError(Exception):
    """Why a part has no result."""


def _result(part: GpuPart, folder: Path, environ: Mapping[str, str]) -> Any:
    started = _Started(folder=folder, environ=environ, until=time.monotonic() + part.limit_seconds)
    if part.kind == "resume":
        digits = str(folder / "digits")
        started.command("pack", "digits", "--out", digits)
        words = ("verify-resume", "digits_smoke", "--data.url", digits, "--run-dir", str(folder), "--json")
        more = ("--steps", "12", "--device", part.device, "--engine.deterministic")
        return {"verdict": parse_json(started.command(*words, *more))}
    if part.kind == "loader" and not part.data_url:
        images = folder / "images" / "one"
        images.mkdir(parents=True)
        started.part(replace(part, kind="pictures", data_url=str(images)))
        started.command("pack", "folder", "--source.root", str(images.parent), "--out", str(folder / "packed"))
        part = replace(part, data_url=str(folder / "packed"))
    return started.part(part)


@dataclass(frozen=True, kw_only=True)
class _Started:
    """What a part starts, in its folder, until its time is over. _FailedError with the last line that was written."""

    folder: Path
    environ: Mapping[str, str]
    until: float

    def command(self, *words: str) -> bytes:
        """What `patchline WORDS` writes to standard output."""
        return self._output(["jobs.cli", *words], num_ranks=1)

    def part(self, part: GpuPart) -> Any:
        """The result of a part, measured by a process for each rank."""
        file = self.folder / "result.json"
        self._output(["pipeline.gpu_parts.parts", str(file), json.dumps(asdict(part))], num_ranks=part.ranks)
        try:
            return parse_json(file.read_bytes())
        except (OSError, ValueError) as error:
            raise _FailedError(f"it wrote no result: {error}") from error

    def _output(self, words: list[str], *, num_ranks: int) -> bytes:
        output, errors = self.folder / "output", self.folder / "errors"
        shared = dict(self.environ)
        if num_ranks > 1:
            shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
            shared |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(num_ranks))
        processes = []
        with output.open("wb") as stdout, errors.open("wb") as stderr:
            for rank in range(num_ranks):
                own = shared | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if num_ranks > 1 else {})
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-P", "-m", *words],  # -P: the current folder may have a jobs/, too
                        env=own,
                        stdin=subprocess.DEVNULL,
                        stdout=stdout,
                        stderr=stderr,
                        start_new_session=True,  # so that all that it starts can be ended with it
                    )
                )
            code = _ended(processes, self.until - time.monotonic())
        if code == 0:
            return output.read_bytes()
        said = [line.strip() for line in errors.read_text(errors="replace").splitlines() if line.strip()]
        how = "its time was over" if code is None else f"it ended with {code}"
        raise _FailedError(f"{how}: {said[-1][:_MOST_SAID]}" if said else how)


def _ended(processes: list["subprocess.Popen[bytes]"], seconds: float) -> int | None:
    """The first code that is not 0, else 0; None if time is over. All of them, and what they started, have ended."""
    until, codes = time.monotonic() + seconds, list[int]()
    try:
        for process in processes:
            codes.append(process.wait(max(0.0, until - time.monotonic())))
            if codes[-1]:
                return codes[-1]
    except subprocess.TimeoutExpired:
        return None
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return 0


def _write(out: Path, found: dict[str, Any]) -> None:
    """The results as JSON, and the page that draws them."""
    write_out(out, json.dumps(found, indent=1).encode() + b"\n", todo=_OTHER_OUT)
    write_out(out.with_suffix(".html"), gpu_page(found), todo=_OTHER_OUT)
