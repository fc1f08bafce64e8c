"""Accounts for every millisecond of a step on a GPU, from a trace of PyTorch's profiler. All functions are pure.

A step is divided at the beginnings and ends of kernels. Each piece belongs to the class of a kernel that runs in it, or
is idle, so that the classes and idle time add up to the step:

    products   matrix products of cuBLAS, CUTLASS and Triton's templates
    attention  fused attention of any library
    ours       Triton kernels that inductor wrote, and PyTorch's own elementwise kernels, copies and sums
    update     whatever the update launches, except for exchanges
    exchange   NCCL, as far as nothing else runs beside it
    copies     copies and fills by the device's copy engines
    other      kernels with names that no pattern knows

A kernel belongs to the forward pass, the backward pass or the update by the time at which the host launched it. On a
CPU, the operators of PyTorch take the place of kernels.
"""

import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

STEP, FORWARD, ACCUMULATE, UPDATE = (f"patchline.{name}" for name in ("step", "forward", "accumulate", "update"))
"""The names of the ranges (torch.profiler.record_function) that a measured step must have. The backward pass is what
ACCUMULATE has beside FORWARD."""
CLASSES = ("products", "attention", "ours", "update", "copies", "other", "exchange")
"""The classes of kernels. If kernels run at the same time, the first class gets the time."""
IDLE = "idle"
_PHASES = {FORWARD: "forward", ACCUMULATE: "backward", UPDATE: "update"}
# Attention comes before products, because its kernels may have `cutlass` or `dot` in their names, and products before
# Triton's kernels, because inductor's templates of products begin with `triton_`.
_PATTERNS = tuple(
    (kind, re.compile(pattern, re.IGNORECASE))
    for kind, pattern in (
        ("exchange", r"nccl|gloo|c10d::|all_?reduce|all_?gather|reduce_?scatter|deepspeed::comm"),
        ("attention", r"flash|fmha|sdpa|cudnn::fusion|scaled_dot_product|attend_|flex_attention|AttentionKernel"),
        ("products", r"nvjet|gemm|gemv|cublas|cutlass|xmma|wgmma|triton_tem_|scaled_mm|convolution|mkldnn"),
        ("products", r"^aten::(mm|addmm|bmm|baddbmm|linear|matmul)$"),
        ("copies", r"^(Memcpy|Memset) "),
        ("ours", r"^triton_|at::native|at_cuda_detail|\bcub::|multi_tensor|elementwise_kernel|reduce_kernel"),
        (
            "ours",
            r"^aten::|^torch::autograd|^autograd::|Backward\d*$|Compiled|Dynamo|AOTDispatcher|Pregraph|^patchline",
        ),
    )
)
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_WAITS = re.compile(r"cuda(Device|Stream|Event)Synchronize")  # also behind each value that is read from a tensor
_LEAST_STEPS = 3
_MOST_KERNELS, _MOST_GAPS, _MOST_CHARACTERS = 400, 12, 160
_KERNEL_CODE = re.compile(r"async_compile\.triton\('(\w+)',(.*?)^'''", re.DOTALL | re.MULTILINE)
_GIGABYTES = re.compile(r"'kernel_num_gb': ([0-9.e+-]+)")


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One kernel that ran, in microseconds of the trace. `launched`: when the host launched it. `step`: the number of
    the step that launched it. `phase`: forward, backward or update, or empty outside of them."""

    name: str
    began: float
    ended: float
    launched: float
    step: int = 0
    phase: str = ""

    @property
    def kind(self) -> str:
        """The kernel's class."""
        return class_of(self.name, phase=self.phase)


def class_of(name: str, *, phase: str = "") -> str:
    """Returns the class of a kernel from its name. `phase`: in which part of a step it was launched."""
    found = next((kind for kind, pattern in _PATTERNS if pattern.search(name)), "other")
    return "update" if phase == "update" and found != "exchange" else found


def account_of(trace: Mapping[str, Any], *, gigabytes: Mapping[str, float] | None = None) -> dict[str, Any]:
    """Returns what the whole steps of a trace spent their time on, in milliseconds per step. `trace`: what
    `torch.profiler.profile.export_chrome_trace` writes. `gigabytes`: what each Triton kernel reads and writes, by its
    name. Raises ValueError for a trace of fewer than three steps with kernels.

    A step is the time from its first kernel to that of the next step. The first step is left out, because the device
    was idle before it, and the last, because no other follows."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    kernels = _placed(sorted(kernels_of(events), key=lambda each: each.began), _ranges(events))
    begins = {each.step: each.began for each in reversed(kernels)}
    if len(begins) < _LEAST_STEPS:
        raise ValueError(f"the trace has kernels of {len(begins)} steps; {_LEAST_STEPS} are needed")
    first, last = min(begins) + 1, max(begins)
    start, end, num_steps = begins[first], begins[last], last - first
    inside = [each for each in kernels if first <= each.step < last]
    scale = 1e-3 / num_steps
    spent = defaultdict[str, float](float)
    for kind, microseconds in _pieces(kernels, start=start, end=end):  # also of a step before that still runs
        spent[kind] += microseconds
    gaps = list(_gaps(kernels, start=start, end=end))
    return {
        "step_milliseconds": round((end - start) * scale, 3),
        "classes": {kind: round(spent[kind] * scale, 3) for kind in (*CLASSES, IDLE)},
        "num_kernels": len(inside) // num_steps,
        "num_waits": _num_waits(events, steps=range(first, last)) // num_steps,
        "kernels": list(_grouped(inside, scale=scale, num_steps=num_steps, gigabytes=gigabytes or {})),
        "idle": list(_by_place(gaps, scale=scale, num_steps=num_steps)),
        "gaps": [_shown(gap) for gap in sorted(gaps, key=lambda gap: -gap.microseconds)[:_MOST_GAPS]],
    }


def kernels_of(events: Sequence[Mapping[str, Any]]) -> Iterator[Kernel]:
    """Yields the kernels of a trace or, if it has none, the pieces of time in which an operator of the CPU ran and none
    that it called."""
    launches = {
        event["args"]["correlation"]: float(event["ts"])
        for event in events
        if event.get("cat") in _LAUNCHES and "correlation" in event.get("args", {})
    }
    on_device = [event for event in events if event.get("cat") in _ON_DEVICE]
    for event in on_device:
        began = float(event["ts"])
        launched = launches.get(event.get("args", {}).get("correlation"), began)
        yield Kernel(name=event["name"], began=began, ended=began + float(event["dur"]), launched=launched)
    if on_device:
        return
    by_thread = defaultdict[Any, list[Mapping[str, Any]]](list)
    for event in events:
        if event.get("cat") == "cpu_op":
            by_thread[event.get("tid")].append(event)
    for operators in by_thread.values():
        yield from _innermost(operators)


def kernel_gigabytes(code: str) -> dict[str, float]:
    """Returns what each Triton kernel in inductor's code reads and writes. Kernels of one name that differ are left
    out. The code must have been made with torch._inductor.config.benchmark_combo_kernel."""
    found = defaultdict[str, set[float]](set)
    for name, source in _KERNEL_CODE.findall(code):
        found[name].update(float(each) for each in _GIGABYTES.findall(source))
    return {name: next(iter(each)) for name, each in found.items() if len(each) == 1}


def _innermost(operators: Iterable[Mapping[str, Any]]) -> Iterator[Kernel]:
    """Yields the pieces of time in which each operator of one thread ran itself, not one that it called."""
    running: list[tuple[str, float]] = []  # name and end, the innermost last
    time = 0.0

    def until(moment: float) -> Iterator[Kernel]:
        nonlocal time
        while running:
            name, end = running[-1]
            upto = min(end, moment)
            if upto > time:
                yield Kernel(name=name, began=time, ended=upto, launched=time)
                time = upto
            if end > moment:
                return
            running.pop()

    for event in sorted(operators, key=lambda event: (float(event["ts"]), -float(event["dur"]))):
        began = float(event["ts"])
        yield from until(began)
        time = began
        running.append((event["name"], began + float(event["dur"])))
    yield from until(float("inf"))


@dataclass(frozen=True, kw_only=True)
class _Ranges:
    """The ranges of the host's time in which it launched each step and each part of it, sorted by their beginnings, the
    outer ones before those inside."""

    steps: list[tuple[float, float]]
    parts: list[tuple[float, float, str]]


def _ranges(events: Iterable[Mapping[str, Any]]) -> _Ranges:
    steps, parts = [], []
    for event in events:
        if event.get("cat") == "user_annotation":
            began = float(event["ts"])
            ended = began + float(event["dur"])
            if event["name"] == STEP:
                steps.append((began, ended))
            elif event["name"] in _PHASES:
                parts.append((began, ended, _PHASES[event["name"]]))
    return _Ranges(steps=sorted(steps), parts=sorted(parts, key=lambda part: (part[0], -part[1])))


def _placed(kernels: Iterable[Kernel], ranges: _Ranges) -> list[Kernel]:
    """Returns the kernels that a step launched, with their step and phase."""
    found = []
    step_begins, part_begins = [began for began, _ in ranges.steps], [began for began, *_ in ranges.parts]
    for kernel in kernels:
        step = bisect_right(step_begins, kernel.launched) - 1
        if step < 0 or kernel.launched > ranges.steps[step][1]:
            continue
        part = bisect_right(part_begins, kernel.launched)
        # The innermost range is the last one that began before and has not ended: FORWARD is inside ACCUMULATE.
        candidates = reversed(ranges.parts[max(0, part - len(_PHASES)) : part])
        phase = next((name for _, ended, name in candidates if kernel.launched <= ended), "")
        found.append(replace(kernel, step=step, phase=phase))
    return found


def _pieces(kernels: Iterable[Kernel], *, start: float, end: float) -> Iterator[tuple[str, float]]:
    """Yields the class and the length of each piece of the time from `start` to `end`. A piece without a kernel is
    idle."""
    changes = []
    for kernel in kernels:
        for moment, sign in ((kernel.began, 1), (kernel.ended, -1)):
            changes.append((min(max(moment, start), end), kernel.kind, sign))
    running, before = Counter[str](), start
    for moment, kind, sign in sorted(changes, key=lambda change: change[0]):
        if moment > before:
            yield next((name for name in CLASSES if running[name]), IDLE), moment - before
            before = moment
        running[kind] += sign
    if end > before:
        yield IDLE, end - before


@dataclass(frozen=True, kw_only=True)
class _Gap:
    """A time without a kernel. `before`, `after`: the kernels beside it."""

    before: Kernel
    after: Kernel
    microseconds: float

    @property
    def place(self) -> str:
        """The part of the step in which the gap is, or the two parts that it is between."""
        one, other = (each.phase or "outside" for each in (self.before, self.after))
        if self.before.step != self.after.step:
            return "between steps"
        return one if one == other else f"{one} to {other}"

    @property
    def is_late(self) -> bool:
        """Whether the device waited for the host: the next kernel was launched after the previous one had ended."""
        return self.after.launched > self.before.ended


def _gaps(kernels: Sequence[Kernel], *, start: float, end: float) -> Iterator[_Gap]:
    """Yields the gaps between the kernels, which are sorted by their beginnings."""
    last = None
    for kernel in kernels:
        if last and start <= last.ended < kernel.began <= end:
            yield _Gap(before=last, after=kernel, microseconds=kernel.began - last.ended)
        if last is None or kernel.ended > last.ended:
            last = kernel


def _by_place(gaps: Iterable[_Gap], *, scale: float, num_steps: int) -> Iterator[dict[str, Any]]:
    found = defaultdict[str, list[_Gap]](list)
    for gap in gaps:
        found[gap.place].append(gap)
    for place, some in sorted(found.items(), key=lambda each: -sum(gap.microseconds for gap in each[1])):
        yield {
            "place": place,
            "milliseconds": round(sum(gap.microseconds for gap in some) * scale, 3),
            "host_late_milliseconds": round(sum(gap.microseconds for gap in some if gap.is_late) * scale, 3),
            "count": round(len(some) / num_steps, 1),
        }


def _shown(gap: _Gap) -> dict[str, Any]:
    return {
        "milliseconds": round(gap.microseconds / 1000, 3),
        "place": gap.place,
        "is_host_late": gap.is_late,
        "before": gap.before.name[:_MOST_CHARACTERS],
        "after": gap.after.name[:_MOST_CHARACTERS],
    }


def _grouped(
    kernels: Iterable[Kernel], *, scale: float, num_steps: int, gigabytes: Mapping[str, float]
) -> Iterator[dict[str, Any]]:
    """Yields the kernels by name, class and phase, with their own time, the longest first. Kernels beyond the
    _MOST_KERNELS longest are one entry."""
    found = defaultdict[tuple[str, str, str], list[float]](list)
    for kernel in kernels:
        found[kernel.name, kernel.kind, kernel.phase].append(kernel.ended - kernel.began)
    longest = sorted(found.items(), key=lambda each: (-sum(each[1]), each[0]))
    for (name, kind, phase), times in longest[:_MOST_KERNELS]:
        total = sum(times)
        entry: dict[str, Any] = {
            "name": name[:_MOST_CHARACTERS],
            "class": kind,
            "phase": phase,
            "milliseconds": round(total * scale, 4),
            "count": round(len(times) / num_steps, 1),
        }
        if name in gigabytes and total:
            entry["gigabytes_per_second"] = round(gigabytes[name] * len(times) / (total * 1e-6), 1)
        yield entry
    if rest := longest[_MOST_KERNELS:]:
        times = [microseconds for _, some in rest for microseconds in some]
        yield {
            "name": f"{len(rest)} others",
            "class": "several",
            "phase": "",
            "milliseconds": round(sum(times) * scale, 4),
            "count": round(len(times) / num_steps, 1),
        }


def _num_waits(events: Iterable[Mapping[str, Any]], *, steps: range) -> int:
    """Returns how often the host waited for the device while it launched these steps."""
    events = list(events)
    ranges = _ranges(events).steps[steps.start : steps.stop]
    waits = [float(event["ts"]) for event in events if _WAITS.fullmatch(event["name"])]
    return sum(began <= wait <= ended for began, ended in ranges for wait in waits)
