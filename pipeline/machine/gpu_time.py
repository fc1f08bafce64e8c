"""Accounts for every millisecond of a step on a GPU, from a trace of PyTorch's profiler. All functions are pure.

A step is divided at the beginnings and ends of kernels. Each piece belongs to the class of a kernel that runs in it, or
is idle, so that the classes and idle time add up to the step:

    products   matrix products of cuBLAS, CUTLASS and Triton's templates
    attention  fused attention of any library
    ours       Triton kernels that inductor wrote, PyTorch's own elementwise kernels, copies and sums, cuDNN's copies
    update     whatever the update launches, except for exchanges
    exchange   NCCL, as far as nothing else runs beside it
    copies     copies and fills by the device's copy engines
    other      kernels that no step launched, as far as the trace says, or with names that no pattern knows

A kernel belongs to the forward pass, the backward pass or the update by the time at which the host launched it. On a
CPU, the operators of PyTorch take the place of kernels.
"""

import math
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
OTHER, IDLE = "other", "idle"
_PHASES = {FORWARD: "forward", UPDATE: "update", ACCUMULATE: "backward"}  # FORWARD first, as it is inside ACCUMULATE
# Triton's kernels come first, because inductor names them after all operators that they fuse, or whose result they
# convert. Attention comes before products, because its kernels may have `cutlass` or `dot` in their names.
_PATTERNS = tuple(
    (kind, re.compile(pattern, re.IGNORECASE))
    for kind, pattern in (
        ("attention", r"^triton_tem_\w*flex_attention"),  # inductor's templates
        ("products", r"^triton_tem_"),
        ("ours", r"^triton_"),
        ("exchange", r"nccl|gloo|c10d::|all_?reduce|all_?gather|reduce_?scatter|deepspeed::comm"),
        ("attention", r"flash|fmha|sdpa|cudnn::fusion|scaled_dot_product|attend_|flex_attention|AttentionKernel"),
        ("products", r"nvjet|gemm|gemv|cublas|cutlass|xmma|wgmma|scaled_mm|convolution|mkldnn|\bdot_kernel"),
        ("products", r"^aten::(mm|addmm|bmm|baddbmm|linear|matmul)$"),
        ("copies", r"^(Memcpy|Memset) "),
        ("ours", r"at::native|at_cuda_detail|\bcub::|multi_tensor|elementwise_kernel|reduce_kernel|softmax_warp"),
        ("ours", r"nchwToNhwc|nhwcToNchw"),
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
# The parts of a sum over tokens that a kernel leaves to another: where they are made, and the kernel that writes them.
_PARTS = re.compile(
    r"(?P<made>workspace_\d+) = empty_strided_cuda\(\((?P<size>\d+), \), \(1, \), torch\.float32\)"
    r"|(?P<kernel>triton_\w+)\.run\([^\n]*\b(?P<written>workspace_\d+)\b"
)


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One kernel that ran, in microseconds of the trace. `launched`: when the host launched it; None if the trace does
    not say. `step`: the number of the step that launched it; None if it is not known. `phase`: forward, backward or
    update, or empty outside of them."""

    name: str
    began: float
    ended: float
    launched: float | None
    step: int | None = None
    phase: str = ""

    @property
    def kind(self) -> str:
        """The kernel's class."""
        return OTHER if self.step is None else class_of(self.name, phase=self.phase)


def class_of(name: str, *, phase: str = "") -> str:
    """Returns the class of a kernel from its name. `phase`: in which part of a step it was launched."""
    found = next((kind for kind, pattern in _PATTERNS if pattern.search(name)), OTHER)
    return "update" if phase == "update" and found != "exchange" else found


def account_of(
    trace: Mapping[str, Any], *, gigabytes: Mapping[str, float] | None = None, is_gpu: bool = True
) -> dict[str, Any]:
    """Returns what the whole steps of a trace spent their time on, in milliseconds per step. `trace`: what
    `torch.profiler.profile.export_chrome_trace` writes. `gigabytes`: what each Triton kernel reads and writes, by its
    name. `is_gpu`: whether the steps ran on a GPU. Raises ValueError for a trace of fewer than three steps, or of steps
    without kernels.

    A step is the time from its first kernel to that of the next step. The first step is left out, because the device
    was idle before it, and the last, because no other follows."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    ranges = _ranges(events)
    kernels = _placed(sorted(kernels_of(events, is_gpu=is_gpu), key=lambda each: each.began), ranges)
    begins = {each.step: each.began for each in reversed(kernels) if each.step is not None}
    num_ranges = len(ranges[STEP])
    if num_ranges < _LEAST_STEPS or len(begins) < num_ranges:
        raise ValueError(
            f"the profiler saw kernels of {len(begins)} steps of {num_ranges}; it must see those of all, and of "
            f"{_LEAST_STEPS} at least"
        )
    first, last = 1, num_ranges - 1
    start, end, num_steps = begins[first], begins[last], last - first
    inside = [
        each for each in kernels if (first <= each.step < last if each.step is not None else start <= each.began < end)
    ]
    scale = 1e-3 / num_steps
    spent = defaultdict[str, float](float)
    for kind, microseconds in _pieces(kernels, start=start, end=end):  # also of a step before that still runs
        spent[kind] += microseconds
    gaps = list(_gaps(kernels, start=start, end=end))
    return {
        "step_milliseconds": round((end - start) * scale, 3),
        "classes": {kind: round(spent[kind] * scale, 3) for kind in (*CLASSES, IDLE)},
        "num_kernels": len(inside) // num_steps,
        "num_waits": _num_waits(events, ranges[STEP][first:last]) // num_steps,
        "kernels": list(_grouped(inside, scale=scale, num_steps=num_steps, gigabytes=gigabytes or {})),
        "idle": list(_by_place(gaps, scale=scale, num_steps=num_steps)),
        "gaps": [_shown(gap) for gap in sorted(gaps, key=lambda gap: -gap.microseconds)[:_MOST_GAPS]],
    }


def kernels_of(events: Sequence[Mapping[str, Any]], *, is_gpu: bool) -> Iterator[Kernel]:
    """Yields the kernels of a trace or, on a CPU, the pieces of time in which an operator ran and none that it called.
    Raises ValueError for a trace of a GPU without its kernels."""
    launches = {
        event["args"]["correlation"]: float(event["ts"])
        for event in events
        if event.get("cat") in _LAUNCHES and "correlation" in event.get("args", {})
    }
    on_device = [event for event in events if event.get("cat") in _ON_DEVICE]
    for event in on_device:
        began = float(event["ts"])
        launched = launches.get(event.get("args", {}).get("correlation"))
        yield Kernel(name=event["name"], began=began, ended=began + float(event["dur"]), launched=launched)
    if is_gpu:
        if not on_device:
            raise ValueError(
                "the profiler saw no kernels on the GPU: another process may be profiling, or CUPTI is missing"
            )
        return
    by_thread = defaultdict[Any, list[Mapping[str, Any]]](list)
    for event in events:
        if event.get("cat") == "cpu_op":
            by_thread[event.get("tid")].append(event)
    for operators in by_thread.values():
        yield from _innermost(operators)


def kernel_gigabytes(code: str) -> dict[str, float]:
    """Returns what each Triton kernel in inductor's code reads and writes, including the parts of sums, which inductor
    does not count. Kernels of one name that differ are left out. The code must have been made with
    torch._inductor.config.benchmark_combo_kernel."""
    found, sizes, parts = defaultdict[str, set[float]](set), dict[str, int](), dict[str, float]()
    for each in _PARTS.finditer(code):
        if each["made"]:
            sizes[each["made"]] = int(each["size"])
        else:
            parts[each["kernel"]] = 4e-9 * sizes.get(each["written"], 0)
    for name, source in _KERNEL_CODE.findall(code):
        found[name].update(round(float(each) + parts.get(name, 0.0), 9) for each in _GIGABYTES.findall(source))
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


def _ranges(events: Iterable[Mapping[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """Returns the ranges of the host's time in which it launched each step and each part of it, by their names, sorted.
    Ranges of one name do not overlap."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in (STEP, *_PHASES)}
    for event in events:
        if event.get("cat") == "user_annotation" and event["name"] in found:
            began = float(event["ts"])
            found[event["name"]].append((began, began + float(event["dur"])))
    return {name: sorted(each) for name, each in found.items()}


def _inside(ranges: Sequence[tuple[float, float]], moment: float | None) -> int | None:
    """Returns the number of the range in which the moment is, or None."""
    if moment is None:
        return None
    number = bisect_right(ranges, (moment, math.inf)) - 1
    return number if number >= 0 and moment <= ranges[number][1] else None


def _placed(kernels: Iterable[Kernel], ranges: Mapping[str, Sequence[tuple[float, float]]]) -> list[Kernel]:
    """Returns the kernels with their step and phase."""
    found = []
    for kernel in kernels:
        step = _inside(ranges[STEP], kernel.launched)
        phases = (phase for name, phase in _PHASES.items() if _inside(ranges[name], kernel.launched) is not None)
        found.append(replace(kernel, step=step, phase="" if step is None else next(phases, "")))
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
        steps = {self.before.step, self.after.step}
        if len(steps) == 2 and None not in steps:
            return "between steps"
        return one if one == other else f"{one} to {other}"

    @property
    def is_late(self) -> bool:
        """Whether the device waited for the host: the next kernel was launched after the previous one had ended."""
        return self.after.launched is not None and self.after.launched > self.before.ended


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


def _num_waits(events: Iterable[Mapping[str, Any]], steps: Iterable[tuple[float, float]]) -> int:
    """Returns how often the host waited for the device while it launched these steps."""
    waits = [float(event["ts"]) for event in events if _WAITS.fullmatch(event["name"])]
    return sum(began <= wait <= ended for began, ended in steps for wait in waits)
