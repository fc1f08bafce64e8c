"""`patchline doctor --gpu`: runs the parts of a GPU trial one after another, and writes their results to a file and a
page.

Each part runs in its own process (several processes if GPUs exchange data), so a part that crashes, hangs or runs out
of memory loses only its own result. The file is written after every part. An interrupted trial continues from it:
results in the file are not measured again, and what failed is. A file of another device, or of other versions, is
refused. The page draws the results next to the plan's predictions.

An option's part gets the micro-batch and the kernel of attention of the part that it is compared with. If they differ
nevertheless, or if the rounds differ by too much, the comparison settles nothing.
"""

import json
import logging
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape

from jobs import exit_codes
from jobs.output import put, write_out
from pipeline.machine.gpu_sizes import CODE_SUFFIX, LEAST_GAIN, MOST_CODE, GpuPart, parts_of
from pipeline.machine.gpu_time import CLASSES, IDLE, OTHER
from pipeline.ranks.host import free_port
from shards.errors import InvalidDataError, UserError
from shards.files.local_files import read_local_file, read_tail
from shards.files.typed_json import parse_json
from shards.output.quantities import duration, number, percent, plural, size
from shards.output.terminal import printable, printable_name
from shards.pages.page import page, svg, text_width

_BAR, _GAP, _WIDTH, _RIGHT = 18, 10, 540, 130
Entry = Mapping[str, Any]
log = logging.getLogger(__name__)
_MOST_FILE_BYTES, _TAIL_BYTES = 16 << 20, 1 << 16
_MOST_SAID = 300
_LEAST_SHARE = 0.002  # of a step
_LEAST_KNOWN = 0.99  # of a step, by kernels of known classes and idle time
_MOST_SLOWED = 0.03  # by the profiler
_NEAR = 0.005  # so near to LEAST_GAIN, a gain has two decimals
_NO_PROFILE = {"failed": "this record has none"}
_NO_FILE_NAME = re.compile(r"[^\w.-]+")
_OTHER_OUT = "give another --out"
_PAGE = ".html"
_MAY_DIFFER = ("lacks",)  # a package may be installed later


def measure(*, device: str, out: Path, data_url: str, environ: Mapping[str, str]) -> int:
    """Measures every part that `out` does not have yet, and writes `out` and the page next to it. Returns 1 if a part
    failed, else 0. Raises UserError if there is no GPU to measure, or if `out` was not written by this command, or not
    on this device with these versions."""
    from pipeline.machine.gpu_parts import device_facts, source_digest  # noqa: PLC0415 - loads torch

    if out.suffix == _PAGE:
        raise UserError(f"--out is '{out}', but {_PAGE} is the page beside the results; give a name that ends in .json")
    about, source = device_facts(device), source_digest()
    num_gpus = about["num_gpus"] if about["device"] == "cuda" else 2  # gloo ranks
    has = [name for name, fault in about["lacks"].items() if not fault]
    parts = parts_of(about["device"], num_gpus=num_gpus, has=has, data_url=data_url)
    for name, fault in about["lacks"].items():
        if fault:
            put(f"no steps with {name}: {printable_name(fault)}\n")
    entries = _before(out, about)  # each stays until a new result replaces it
    began, is_gpu = time.monotonic(), about["device"] == "cuda"
    if is_gpu:
        todo = [part for name, part in parts.items() if "result" not in entries.get(name, {})]
        seconds = sum(part.expected_seconds for part in todo)
        put(f"{plural(len(todo), 'part')} to measure, about {duration(seconds)} on an H200 (estimated)\n")
    for place, (name, asked) in enumerate(parts.items(), 1):
        old = entries.get(name, {})
        part = asked.like(entries.get(asked.question.beside, {}).get("result", {})) if asked.question else asked
        if _is_kept(old, part):
            entries[name] = old | {"part": _plain(part)}
            note = "kept" if old.get("source") == source else "kept, measured with other code"
        else:
            entries[name] = _measured(part, environ, code=_code_of(name, out)) | {"source": source}
            earlier = old if "result" in old else old.get("earlier")
            if earlier and "result" not in entries[name]:
                entries[name]["earlier"] = earlier
            estimated = f", {duration(part.expected_seconds)} estimated" if is_gpu else ""
            note = f"{duration(entries[name]['seconds'])}{estimated}"
        _write(out, {"about": about, "parts": {each: entries[each] for each in (*parts, *entries) if each in entries}})
        put(f"[{place}/{len(parts)}] {printable_name(f'{name}: {words_of(entries[name])}')} ({note})\n")
    for verdict in verdicts(entries) if is_gpu else ():  # a CPU says nothing about speed
        put(printable_name(verdict.words) + "\n")
    failed = [name for name in parts if "result" not in entries[name]]
    how = f"{plural(len(failed), 'part')} failed: {', '.join(failed)}" if failed else "all parts measured"
    put(f"{how}, in {duration(time.monotonic() - began)}: {out}, {out.with_suffix(_PAGE)}\n")
    return exit_codes.FAULTS_FOUND if failed else exit_codes.DONE


def _code_of(name: str, out: Path) -> Path:
    """Returns where the code of a part's kernels is kept: in a folder beside the file of results."""
    return out.with_suffix(".kernels") / f"{_NO_FILE_NAME.sub('-', name)}.py"


def _plain(part: GpuPart) -> dict[str, Any]:
    """Returns the part as `_before` reads it back from JSON."""
    found: dict[str, Any] = json.loads(json.dumps(asdict(part)))
    return found


def _is_kept(entry: Entry, part: GpuPart) -> bool:
    """Returns whether the entry of a file has the part's result."""
    try:
        measured = GpuPart(**entry["part"] | {"question": None}).measured()
        return "result" in entry and _plain(measured) == _plain(part.measured())
    except Exception:  # from whatever the file has instead of a part
        return False


def _is_shown(entry: Entry, about: Mapping[str, Any]) -> bool:
    try:
        gpu_page({"about": about, "parts": {"part": entry}})
        return True
    except Exception:  # from whatever the file has instead of a result
        return False


def _before(out: Path, about: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the parts in the file that can be shown; none if there is no file. Raises UserError if the file was not
    written by this command, or on another device or with other versions."""
    if not out.exists():
        return {}
    try:
        found = parse_json(read_local_file(out, most_bytes=_MOST_FILE_BYTES))
        parts = found["parts"]
        if not all(isinstance(entry, dict) for entry in parts.values()):
            raise TypeError("a part is no object")
        before = {key: found["about"].get(key) for key in about}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, InvalidDataError) as error:
        raise UserError(f"{out} is no file of `doctor --gpu` ({error})", todo=_OTHER_OUT) from error
    others = {key: value for key, value in before.items() if value != about[key] and key not in _MAY_DIFFER}
    if others:
        words = ", ".join(f"{key} {value!r:.80} (here {about[key]!r:.80})" for key, value in others.items())
        raise UserError(f"{out} has results of another device or other versions: {words}", todo=_OTHER_OUT)
    shown = {name: dict(entry) for name, entry in parts.items() if _is_shown(entry, about)}
    for name in parts.keys() - shown.keys():
        put(f"{printable_name(name)}: what {out} has of it cannot be shown, and is dropped\n")
    return shown


def _measured(part: GpuPart, environ: Mapping[str, str], *, code: Path) -> dict[str, Any]:
    """Measures a part. Returns it with its result, or with the reason why there is none. Writes the code of its kernels
    to `code` if inductor has made any."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="patchline-gpu-") as folder:
        try:
            outcome = {"result": _result(part, Path(folder), environ)}
        except _FailedError as error:
            outcome = {"failed": str(error)}
        with suppress(FileNotFoundError):
            data = read_local_file(Path(folder, "result").with_suffix(CODE_SUFFIX), most_bytes=4 * MOST_CODE)
            code.parent.mkdir(parents=True, exist_ok=True)
            write_out(code, printable(data.decode(errors="replace")).encode(), todo=_OTHER_OUT)
        return {"part": _plain(part), "seconds": round(time.monotonic() - began, 1)} | outcome


class _FailedError(Exception):
    """Says why a part has no result."""


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
    """Runs the processes of a part, and ends them at the time `until`. If they fail, raises _FailedError with the last
    line that they wrote."""

    folder: Path
    environ: Mapping[str, str]
    until: float

    def command(self, *words: str) -> bytes:
        """Runs `patchline WORDS` and returns what it writes to standard output."""
        return self._output(["jobs.cli", *words], num_ranks=1)

    def part(self, part: GpuPart) -> Any:
        """Measures a part with one process per rank, and returns its result."""
        file = self.folder / "result.json"
        words = json.dumps(asdict(part.measured()))
        self._output(["pipeline.machine.gpu_parts", str(file), words], num_ranks=part.ranks)
        try:
            return parse_json(read_local_file(file, most_bytes=_MOST_FILE_BYTES))
        except (OSError, ValueError, InvalidDataError) as error:
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
                        start_new_session=True,  # so that its child processes can be killed with it
                    )
                )
            code = _ended(processes, self.until - time.monotonic())
        if code == 0:
            return read_local_file(output, most_bytes=_MOST_FILE_BYTES)
        tail = read_tail(errors, most_bytes=_TAIL_BYTES)
        said = (
            [line.strip() for line in tail.data.decode(errors="replace").splitlines() if line.strip()] if tail else []
        )
        how = "its time was over" if code is None else f"it ended with {code}"
        raise _FailedError(f"{how}: {said[-1][:_MOST_SAID]}" if said else how)


def _ended(processes: list["subprocess.Popen[bytes]"], seconds: float) -> int | None:
    """Waits for the processes, then kills those that are left, and all child processes. Returns the first exit code
    that is not 0, or 0 if all are 0, or None if `seconds` pass first."""
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
    """Writes the results as JSON, and as a page."""
    write_out(out, json.dumps(found, indent=1).encode() + b"\n", todo=_OTHER_OUT)
    write_out(out.with_suffix(_PAGE), gpu_page(found), todo=_OTHER_OUT)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What two parts say about an option. `words`: one line, with the gain. `settles`: the question. `is_lost`: whether
    the option wins too little to be kept."""

    words: str
    settles: str
    is_lost: bool = False


def verdicts(entries: Mapping[str, Entry]) -> Iterator[Verdict]:
    """Yields a verdict for each part that measures an option. This function is pure."""
    for entry in entries.values():
        if question := entry["part"].get("question"):
            yield _verdict(question, entry, entries.get(question["beside"], {}))


def _verdict(question: Mapping[str, Any], entry: Entry, beside: Entry) -> Verdict:
    option, settles = question["option"], question["settles"]
    if why := _why_not_comparable(question, entry, beside):
        return Verdict(words=f"{option}: not settled, since {why}", settles=settles)
    own, other = (sorted(each["result"]["images_per_second"]) for each in (entry, beside))
    if entry["part"]["without"]:
        own, other = other, own
    gain = statistics.median(own) / statistics.median(other) - 1
    # Without the fastest and the slowest of five rounds.
    least, most = (
        own[len(own) // 4] / other[-1 - len(other) // 4] - 1,
        own[-1 - len(own) // 4] / other[len(other) // 4] - 1,
    )
    words = f"{option}: {_gain(gain)} (rounds: {_gain(least)} to {_gain(most)}; expected: {question['expects']})"
    if question["is_kept_if_slow"]:
        return Verdict(words=words, settles=settles)
    if least < LEAST_GAIN <= most:
        return Verdict(words=f"{words}; not settled, since rounds differ by too much", settles=settles)
    is_lost = gain < LEAST_GAIN
    words += f"; delete: it wins less than {percent(LEAST_GAIN)}" if is_lost else "; keep"
    return Verdict(words=words, settles=settles, is_lost=is_lost)


def _why_not_comparable(question: Mapping[str, Any], entry: Entry, beside: Entry) -> str:
    """Returns why two parts differ by more than the option; empty if they do not."""
    if "result" not in entry or "result" not in beside:
        return "a part failed"
    if entry.get("source") != beside.get("source"):
        return "the parts were measured with different code"
    own, other = entry["result"], beside["result"]
    if own.get("micro_batch") != other.get("micro_batch"):
        return f"the micro-batch was {own.get('micro_batch')}, and {other.get('micro_batch')} without the option"
    if own.get("attention") != other.get("attention") and not question.get("is_attention"):
        return f"attention was by {own.get('attention')}, and by {other.get('attention')} without the option"
    return ""


def _gain(gain: float) -> str:
    return f"{100 * gain:+.{2 if abs(gain - LEAST_GAIN) < _NEAR else 1}f} %"


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A bar of a plot. `text` is its value as text, and `style` the CSS class of its colour."""

    name: str
    value: float
    text: str
    style: str


def words_of(entry: Entry) -> str:
    """Returns the result of a part in one line, or why it failed."""
    result = entry.get("result")
    if result is None:
        return str(entry["failed"])
    rate = number(statistics.median(result["images_per_second"])) if "images_per_second" in result else ""
    match entry["part"]["kind"]:
        case "step":
            return _step_words(result, rate)
        case "rank":
            return f"{_step_words(result, rate)}; {_rank_words(result)}, through {result['backend']}"
        case "determinism":
            bits = "the same" if result["same_bits"] else "OTHER"
            return f"{_step_words(result, rate)}; two runs have {bits} bits"
        case "attention":
            return "; ".join(f"{shape}: {_fastest(times)}" for shape, times in result["milliseconds"].items())
        case "zero":
            return f"{rate} images/s through {result['backend']}, loss {result['losses'][-1]:.6f} after five steps"
        case "together":
            return f"{rate} images/s of {result['ranks']} ranks through {result['backend']}"
        case "loader":
            cpu = number(result["cpu_seconds_per_1000"])
            return f"{rate} images/s with {result['threads']} threads, {cpu} CPU-seconds per 1,000"
        case "exchange":
            best = number(max(result["gigabytes_per_second"].values()))
            return f"{result['ranks']} ranks through {result['backend']}: {best} GB/s bus bandwidth at most"
        case "resume":
            return "a killed run continued with the same bits"
        case kind:
            return f"a part of the unknown kind {kind!r}"


def _step_words(result: Mapping[str, Any], rate: str) -> str:
    share = f", MFU {percent(result['mfu'])}" if result["mfu"] is not None else ""
    allocated, predicted = result["allocated_bytes"], size(result["predicted_bytes"])
    memory = f"{size(allocated)} of {predicted} predicted" if allocated is not None else f"{predicted} predicted"
    first = duration(result["first_step_seconds"])
    attention = f"attention {result['attention']}"
    words = f"{rate} images/s{share}, micro-batch {result['micro_batch']}, {attention}, {memory}, first step {first}"
    return f"{words}; {equation_of(result)}"


def equation_of(result: Mapping[str, Any]) -> str:
    """Returns the milliseconds of the profiled step as the sum of what it spent them on, and those of the measured one.
    What took no time is left out."""
    time, measured = result.get("time", _NO_PROFILE), _step_milliseconds(result)
    if "failed" in time:
        return f"no profile: {time['failed']}"
    step, classes = time["step_milliseconds"], time["classes"]
    terms = " + ".join(f"{number(spent)} {kind}" for kind, spent in classes.items() if spent)
    known = sum(spent for kind, spent in classes.items() if kind != OTHER) / step
    words = f"{number(step)} ms profiled ({number(measured)} measured) = {terms}; {percent(known)} explained"
    if known < _LEAST_KNOWN:
        words += f", less than {percent(_LEAST_KNOWN)}"
    if abs(step / measured - 1) > _MOST_SLOWED:
        words += f"; the profiled step took {number(step / measured)} times as long as the measured one"
    return words


def _step_milliseconds(result: Mapping[str, Any]) -> float:
    return float(1000 * result["micro_batch"] / statistics.median(result["images_per_second"]))


def _rank_words(result: Mapping[str, Any]) -> str:
    update = f"{number(result['update_milliseconds'])} ms for the update alone"
    host = number(result["host_milliseconds"])
    words = f"{number(_step_milliseconds(result))} ms a step, launched in {host} ms, {update}"
    if (idle := _idle_share(result)) is None:
        return words
    time = result["time"]
    return f"{words}, device idle {percent(idle)}, {time['num_kernels']:,} kernels, {plural(time['num_waits'], 'wait')}"


def _idle_share(result: Mapping[str, Any]) -> float | None:
    """Returns the share of a measured step in which the device computes nothing, or None if there is no profile."""
    time = result["time"]
    if "failed" in time:
        return None
    busy: float = time["step_milliseconds"] - time["classes"][IDLE]
    return max(0.0, 1 - busy / _step_milliseconds(result))


def _fastest(by_name: Mapping[str, Any]) -> str:
    """Returns the fastest backend with its milliseconds. Backends that cannot run have a text instead of a number."""
    times = {name: each for name, each in by_name.items() if not isinstance(each, str)}
    best = min(times, key=lambda name: times[name], default="none")
    return f"{best} {number(times[best])} ms" if times else best


def gpu_page(found: Mapping[str, Any]) -> bytes:
    """Returns the page. Equal results give equal bytes."""
    parts: Mapping[str, Entry] = found["parts"]
    done = {name: entry["result"] for name, entry in parts.items() if "result" in entry}
    steps = {name: done[name] for name in done if parts[name]["part"]["kind"] in ("step", "rank", "determinism")}
    kinds = {
        kind: [done[name] for name in done if parts[name]["part"]["kind"] == kind]
        for kind in ("attention", "zero", "exchange", "loader")
    }
    values = {
        "about": found["about"],
        "seconds": sum(entry["seconds"] for entry in parts.values()),
        "parts": [(name, words_of(entry), "result" in entry) for name, entry in parts.items()],
        "num_failed": len(parts) - len(done),
        "verdicts": list(verdicts(parts)) if found["about"]["device"] == "cuda" else [],
        "rates": bars(_rates(steps), about="Images per second: measured, and as planned"),
        "memory": bars(_memory(steps), about="Memory at the peak: allocated, and as predicted"),
        "attention": [_attention(result) for result in kinds["attention"]],
        "classes": (*CLASSES, IDLE),
        "times": [
            (name, _step_milliseconds(result), result["time"], _where_from(result["time"]))
            for name, result in steps.items()
            if "failed" not in result.get("time", _NO_PROFILE)
        ],
        "ranks": [
            (name, result, _step_milliseconds(result), _idle_share(result))
            for name, result in steps.items()
            if "host_milliseconds" in result
        ],
        "zero": kinds["zero"],
        "exchanges": kinds["exchange"],
        "feeds": _feeds(kinds["loader"], steps),
        "median": statistics.median,
    }
    return page("jobs.monitor", "gpu.html.j2", values)


def _where_from(time: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Returns the kernels that take a page's space: all that no class knows, and those of at least _LEAST_SHARE of the
    step."""
    least = _LEAST_SHARE * time["step_milliseconds"]
    return [each for each in time["kernels"] if each["milliseconds"] >= least or each["class"] == OTHER]


def bars(each: Sequence[Bar], *, about: str) -> Markup | None:
    """Draws horizontal bars on one scale. Returns None if there are no bars."""
    if not each:
        return None
    most = max(bar.value for bar in each) or 1.0
    left = 14 + max(text_width(bar.name) for bar in each)
    height = _GAP + len(each) * (_BAR + _GAP)

    def drawn() -> Iterator[str]:
        for place, bar in enumerate(each):
            top = _GAP + place * (_BAR + _GAP)
            wide = bar.value / most * _WIDTH
            middle = top + _BAR * 0.72
            yield f'<text x="{left - 8:.0f}" y="{middle:.0f}" text-anchor="end">{escape(bar.name)}</text>'
            yield f'<rect class="{bar.style}" x="{left:.0f}" y="{top}" width="{wide:.1f}" height="{_BAR}" rx="3"/>'
            yield f'<text x="{left + wide + 6:.0f}" y="{middle:.0f}">{escape(bar.text)}</text>'

    return svg(about, int(left + _WIDTH + _RIGHT), height, drawn())


def _feeds(loaders: Sequence[Mapping[str, Any]], steps: Mapping[str, Any]) -> float | None:
    """Returns how many images the loader prepares while the fastest step processes one."""
    rates = [statistics.median(result["images_per_second"]) for result in steps.values()]
    if not (loaders and rates):
        return None
    return float(statistics.median(loaders[0]["images_per_second"]) / max(rates))


def _rates(steps: Mapping[str, Any]) -> list[Bar]:
    found = []
    for name, result in steps.items():
        rate, planned = statistics.median(result["images_per_second"]), result["planned_images_per_second"]
        share = f" ({percent(result['mfu'])})" if result["mfu"] is not None else ""
        found.append(Bar(name=name, value=rate, text=f"{number(rate)}{share}", style="measured"))
        if planned is not None:
            found.append(Bar(name="as planned", value=planned, text=number(planned), style="planned"))
    return found


def _memory(steps: Mapping[str, Any]) -> list[Bar]:
    found = []
    for name, result in steps.items():
        allocated, predicted = result["allocated_bytes"], result["predicted_bytes"]
        if allocated is not None:
            found.append(Bar(name=name, value=allocated, text=size(allocated), style="measured"))
            found.append(Bar(name="as predicted", value=predicted, text=size(predicted), style="planned"))
    return found


def _attention(result: Mapping[str, Any]) -> tuple[list[str], list[tuple[str, list[tuple[str, bool]]]]]:
    """Returns the names of the backends and, for each shape, the times of all backends as text; True marks the
    fastest."""
    shapes = result["milliseconds"]
    names = list(next(iter(shapes.values())))
    rows = []
    for shape, by_name in shapes.items():
        times = [each for each in by_name.values() if not isinstance(each, str)]
        least = min(times, default=None)
        shown = (("no", False) if isinstance(each, str) else (number(each), each == least) for each in by_name.values())
        rows.append((shape, list(shown)))
    return names, rows
