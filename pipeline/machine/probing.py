"""Runs the probes of probes.py beside each other, each in a process of its own with a deadline.

A driver or a file server that does not answer holds up its own probe only. A process that cannot be killed, because the
kernel waits for such a thing, is left alone.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO

from pipeline.machine.checks import Check
from shards.files.typed_json import read_record
from shards.output.quantities import duration

_MOST_BYTES = 1 << 20
_MOST_SAID = 300  # characters of what a failed probe said
_MODULE = "pipeline.machine.probes"


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What is looked at (`name`, for the table), the words for it, and what to do if it crashes or does not answer."""

    name: str
    words: tuple[str, ...]
    todo: str


@dataclass(frozen=True, kw_only=True)
class _Running:
    probe: Probe
    process: "subprocess.Popen[bytes]"
    output: IO[bytes]
    errors: IO[bytes]


def run_probes(probes: Sequence[Probe], *, seconds: float) -> Iterator[Check]:
    """The checks of all probes, in their order. One that fails, or is not done in `seconds`, adds a fault to those that
    it has made."""
    until = time.monotonic() + seconds
    running = [_started(probe) for probe in probes]
    try:
        for one in running:
            yield from _checks(one, _code(one.process, until), seconds=seconds)
    finally:
        for one in running:
            one.process.kill()


def _started(probe: Probe) -> _Running:
    output, errors = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
    # -P: the current folder may have a pipeline/, too
    words = [sys.executable, "-P", "-m", _MODULE, *probe.words]
    process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=output, stderr=errors)
    return _Running(probe=probe, process=process, output=output, errors=errors)


def _code(process: "subprocess.Popen[bytes]", until: float) -> int | None:
    """The exit code; None if the process still runs when its time is over."""
    try:
        return process.wait(max(0.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None


def _checks(one: _Running, code: int | None, *, seconds: float) -> Iterator[Check]:
    lines = _text(one.output).splitlines(keepends=True)
    for line in lines:
        if line.endswith("\n"):
            try:
                yield read_record(Check, line)
            except ValueError:  # printed by a library
                continue
    if code is None:
        found = f"no answer within {duration(seconds)}"
        yield Check(name=one.probe.name, status="fault", found=found, todo=one.probe.todo)
    elif code != 0:
        said = [line.strip() for line in _text(one.errors).splitlines() if line.strip()]
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        found = f"the check ended with {how}: {said[-1][:_MOST_SAID]}" if said else f"the check ended with {how}"
        yield Check(name=one.probe.name, status="fault", found=found, todo=one.probe.todo)


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(_MOST_BYTES).decode(errors="replace")
