"""The results of `patchline doctor --gpu` in words, and as a page that draws them beside the plan."""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup, escape

from shards.output.quantities import duration, number, percent, size
from shards.pages.page import page, svg, text_width

_BAR, _GAP, _WIDTH, _RIGHT = 18, 10, 540, 130
Entry = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A bar with its words. `style`: of its colour."""

    name: str
    value: float
    text: str
    style: str


def words_of(entry: Entry) -> str:
    """What a part has found, in a line; or why it has found nothing."""
    result = entry.get("result")
    return _WORDS[entry["part"]["kind"]](result) if result is not None else str(entry["failed"])


def gpu_page(found: Mapping[str, Any]) -> bytes:
    """The page. Equal results give equal bytes."""
    parts: Mapping[str, Entry] = found["parts"]
    done = {name: entry["result"] for name, entry in parts.items() if "result" in entry}
    steps = {name: done[name] for name in done if parts[name]["part"]["kind"] in ("step", "determinism")}
    kinds = {kind: [done[name] for name in done if parts[name]["part"]["kind"] == kind] for kind in _WORDS}
    values = {
        "about": found["about"],
        "seconds": sum(entry["seconds"] for entry in parts.values()),
        "parts": [(name, words_of(entry), "result" in entry) for name, entry in parts.items()],
        "num_failed": len(parts) - len(done),
        "rates": bars(_rates(steps), about="Images per second: measured, and as planned"),
        "memory": bars(_memory(steps), about="Memory at the peak: allocated, and as predicted"),
        "attention": [table for result in kinds["attention"] for table in [_attention(result)]],
        "profiles": [(name, done[name]) for name in done if parts[name]["part"]["kind"] == "profile"],
        "zero": kinds["zero"],
        "exchanges": kinds["exchange"],
        "feeds": _feeds(kinds["loader"], steps),
        "median": statistics.median,
    }
    return page("jobs.gpu", "gpu.html.j2", values)


def bars(each: Sequence[Bar], *, about: str) -> Markup | None:
    """Horizontal bars on one scale; None if there are none."""
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
    """What the loader prepares in the time of an image of the fastest step."""
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
    """Names of backends, and for each shape what each takes: the fastest one is marked."""
    shapes = result["milliseconds"]
    names = list(next(iter(shapes.values())))
    rows = []
    for shape, by_name in shapes.items():
        times = [each for each in by_name.values() if not isinstance(each, str)]
        least = min(times, default=None)
        shown = (("no", False) if isinstance(each, str) else (number(each), each == least) for each in by_name.values())
        rows.append((shape, list(shown)))
    return names, rows


def _step_words(result: Mapping[str, Any]) -> str:
    share = f", MFU {percent(result['mfu'])}" if result["mfu"] is not None else ""
    allocated, predicted = result["allocated_bytes"], size(result["predicted_bytes"])
    memory = f"{size(allocated)} of {predicted} predicted" if allocated is not None else f"{predicted} predicted"
    first = duration(result["first_step_seconds"])
    rate = number(statistics.median(result["images_per_second"]))
    attention = f"attention {result['attention']}"
    return f"{rate} images/s{share}, micro-batch {result['micro_batch']}, {attention}, {memory}, first step {first}"


def _determinism_words(result: Mapping[str, Any]) -> str:
    return f"{_step_words(result)}; two runs have {'the same' if result['same_bits'] else 'OTHER'} bits"


def _attention_words(result: Mapping[str, Any]) -> str:
    fastest = []
    for shape, by_name in result["milliseconds"].items():
        times = {name: each for name, each in by_name.items() if not isinstance(each, str)}
        best = min(times, key=lambda name: times[name], default="none")
        fastest.append(f"{shape}: {best}" + (f" {number(times[best])} ms" if times else ""))
    return "; ".join(fastest)


def _zero_words(result: Mapping[str, Any]) -> str:
    rate = number(statistics.median(result["images_per_second"]))
    return f"{rate} images/s through {result['backend']}, loss {result['losses'][-1]:.6f} after five steps"


def _loader_words(result: Mapping[str, Any]) -> str:
    rate, cpu = number(statistics.median(result["images_per_second"])), result["cpu_seconds_per_1000"]
    return f"{rate} images/s with {result['threads']} threads, {number(cpu)} CPU-seconds per 1,000"


def _profile_words(result: Mapping[str, Any]) -> str:
    busy = percent(min(1.0, result["busy_milliseconds"] / result["step_milliseconds"]))
    return f"{number(result['step_milliseconds'])} ms a step, {result['num_launches']:,} kernels, busy {busy}"


def _exchange_words(result: Mapping[str, Any]) -> str:
    best = max(result["gigabytes_per_second"].values())
    return f"{result['ranks']} ranks through {result['backend']}: {number(best)} GB/s bus bandwidth at most"


def _resume_words(_result: Mapping[str, Any]) -> str:
    return "a killed run continued with the same bits"


_WORDS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "step": _step_words,
    "determinism": _determinism_words,
    "attention": _attention_words,
    "zero": _zero_words,
    "loader": _loader_words,
    "profile": _profile_words,
    "exchange": _exchange_words,
    "resume": _resume_words,
}
