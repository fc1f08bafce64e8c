"""The checks of this machine that may crash, hang or load torch: torch and the GPUs, the JPEG decoder, S3, a disk, and
the speed of a node.

    python -P -m pipeline.machine.probes torch|decoder|disk FOLDER|s3 URL

`patchline doctor` runs each of these probes in a separate process, which writes each finding as a line of JSON as soon
as it is known. A driver or a file server that does not answer blocks only its own probe. A process that cannot be
killed, because the kernel waits for such a device, is left behind. `product_seconds` and `exchange` are run by each
rank of `patchline preflight --deep`.
"""

import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING

from pipeline.machine.checks import folder_check
from shards.config_values import shown_value
from shards.errors import Finding, TransientError, UserError
from shards.files.typed_json import read_record
from shards.output.quantities import duration, size
from shards.store import MissingObjectError, open_store

if TYPE_CHECKING:
    import torch

    from pipeline.ranks.world import World

_MOST_BYTES = 1 << 20
_MOST_SAID = 300  # characters of a failed probe's last line
_DRIVER = Path("/proc/driver/nvidia/version")
_MATRIX = 1024
_MOST_ERROR = 0.02  # the largest error of a product in bf16, relative to fp32
_SETUP = "install a torch that fits the driver: make setup TORCH='torch --index-url URL' (docs/training.md)"
_REPEATS = 5
_SIDE = {"cpu": 1024, "cuda": 8192}
_EXCHANGE_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class Probe:
    """A probe: its `name` in the table, the arguments that start it, and what to do if it crashes or does not
    answer."""

    name: str
    words: tuple[str, ...]
    todo: str


@dataclass(frozen=True, kw_only=True)
class _Running:
    probe: Probe
    process: "subprocess.Popen[bytes]"
    output: IO[bytes]
    errors: IO[bytes]


def run_probes(probes: Sequence[Probe], *, seconds: float) -> Iterator[Finding]:
    """Yields the findings of all probes, in order. A probe that crashes, or does not end within `seconds`, adds a fault
    to the findings that it has written."""
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
    words = [sys.executable, "-P", "-m", "pipeline.machine.probes", *probe.words]
    process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=output, stderr=errors)
    return _Running(probe=probe, process=process, output=output, errors=errors)


def _code(process: "subprocess.Popen[bytes]", until: float) -> int | None:
    """Returns the exit code, or None if the process still runs when its time is over."""
    try:
        return process.wait(max(0.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None


def _checks(one: _Running, code: int | None, *, seconds: float) -> Iterator[Finding]:
    lines = _text(one.output).splitlines(keepends=True)
    for line in lines:
        if line.endswith("\n"):
            try:
                yield read_record(Finding, line)
            except ValueError:  # a line that a library has printed
                continue
    if code is None:
        found = f"no answer within {duration(seconds)}"
        yield Finding(name=one.probe.name, status="fault", found=found, todo=one.probe.todo)
    elif code != 0:
        said = [line.strip() for line in _text(one.errors).splitlines() if line.strip()]
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        found = f"the check ended with {how}: {said[-1][:_MOST_SAID]}" if said else f"the check ended with {how}"
        yield Finding(name=one.probe.name, status="fault", found=found, todo=one.probe.todo)


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(_MOST_BYTES).decode(errors="replace")


def main(words: list[str]) -> int:
    """Writes the findings of one probe."""
    probe, *rest = words
    found = {"torch": torch_checks, "decoder": decoder_checks}.get(probe)
    checks = found() if found else iter([folder_check(Path(rest[0])) if probe == "disk" else s3_check(rest[0])])
    for check in checks:
        sys.stdout.write(f"{json.dumps(asdict(check))}\n")
        sys.stdout.flush()
    return 0


def torch_checks() -> Iterator[Finding]:
    """Checks GPU, driver, bf16 and threads as a run on one rank would find them and, if there is a GPU,
    torch.compile."""
    import torch  # noqa: PLC0415 - takes seconds, and is what is probed here

    from pipeline.ranks.world import bf16_of, current_world  # noqa: PLC0415

    build = f"torch {torch.__version__}, {f'CUDA {torch.version.cuda}' if torch.version.cuda else 'without CUDA'}"
    try:
        world = current_world("auto")
    except UserError as error:
        yield Finding(name="GPU", status="fault", found=error.what, todo=_SETUP)
        yield Finding(name="driver", status="warning", found=f"{driver_words(driver_text())}; {build}", todo=_SETUP)
        return
    if world.device.type == "cpu":
        yield Finding(name="GPU", status="ok", found="none, and nothing announces one; runs compute on the CPU")
        yield Finding(name="driver", status="ok", found=f"not needed; {build}")
    else:
        yield from _gpus()
        yield Finding(name="driver", status="ok", found=f"{driver_words(driver_text())}; {build}")
    bf16 = bf16_of(world.device)
    todo = "" if bf16.is_native else "keep --engine.precision auto, which takes fp32 here"
    yield Finding(name="bf16", status="ok" if bf16.is_native else "warning", found=bf16.reason, todo=todo)
    yield Finding(name="threads", status="ok", found=f"{world.num_threads} for a run of one rank")
    if world.device.type == "cuda":
        yield _compile_check(world.device)


def _gpus() -> Iterator[Finding]:
    """Checks each GPU's memory, and a matrix product on it."""
    import torch  # noqa: PLC0415

    for number in range(torch.cuda.device_count()):
        name = f"GPU {number}"
        try:
            properties = torch.cuda.get_device_properties(number)
            free, total = torch.cuda.mem_get_info(number)
            error = _product_error(torch.device("cuda", number))
        except RuntimeError as failed:
            what = " ".join(str(failed).split())[:200]
            todo = "see `nvidia-smi` and `dmesg`; leave this GPU out with CUDA_VISIBLE_DEVICES"
            yield Finding(name=name, status="fault", found=f"it does not compute: {what}", todo=todo)
            continue
        found = f"{properties.name}, {size(total)}, of which {size(free)} are free"
        yield judge_gpu(name, found, error=error, free_share=free / total)


def judge_gpu(name: str, found: str, *, error: float, free_share: float) -> Finding:
    """Judges a GPU. `error`: the error of its product in bf16, relative to fp32. `free_share`: the share of its memory
    that was free before we used any."""
    if not error <= _MOST_ERROR:
        todo = "it computes wrong numbers: have it tested, and leave it out with CUDA_VISIBLE_DEVICES"
        return Finding(name=name, status="fault", found=f"{found}; a product is wrong by {error:.2g}", todo=todo)
    if free_share < 0.9:
        todo = "another process uses it: see `nvidia-smi`"
        return Finding(name=name, status="warning", found=found, todo=todo)
    return Finding(name=name, status="ok", found=found)


def _product_error(device: "torch.device") -> float:
    import torch  # noqa: PLC0415

    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randn(_MATRIX, _MATRIX, generator=generator) for _ in range(2))
    exact = first @ second
    product = (first.to(device, torch.bfloat16) @ second.to(device, torch.bfloat16)).float().cpu()
    return float((product - exact).norm() / exact.norm())


def _compile_check(device: "torch.device") -> Finding:
    from pipeline.models.build import compile_fault  # noqa: PLC0415

    fault = compile_fault(device)
    if not fault:
        return Finding(name="torch.compile", status="ok", found="works")
    todo = "apt-get install g++ python3-dev (Debian), or train without it, more slowly: --engine.compile off"
    return Finding(name="torch.compile", status="warning", found=f"does not work: {fault}", todo=todo)


def driver_words(text: str) -> str:
    """Returns the driver's name and version, from the text of /proc/driver/nvidia/version."""
    found = re.search(r"\b(\d{3}\.\d+(\.\d+)?)\b", text)
    return (
        f"NVIDIA driver {found[1]}" if found else "an NVIDIA driver of unknown version" if text else "no driver found"
    )


def driver_text() -> str:
    """Returns what NVIDIA's driver says of itself; empty if there is none."""
    try:
        return _DRIVER.read_text(errors="replace")[:4096]
    except OSError:
        return ""


def decoder_checks() -> Iterator[Finding]:
    """Yields a finding that says which JPEG decoder a run uses and, if it is not the crop decoder, why."""
    from pipeline.data.transform import crop_decoder, why_no_crop_decoder  # noqa: PLC0415

    decoder = crop_decoder()
    if decoder:
        yield Finding(name="JPEG decoder", status="ok", found=f"crop decoder with {decoder.name}")
        return
    found = f"simplejpeg: {why_no_crop_decoder()}"
    todo = "for more images/s: apt-get install gcc libjpeg62-turbo-dev (Debian), then `make setup`; pixels are the same"
    yield Finding(name="JPEG decoder", status="warning", found=found, todo=todo)


def s3_check(url: str) -> Finding:
    """Checks that the objects of a prefix can be listed, and that the first of them can be read."""
    try:
        store = open_store(url)
        found = list(islice(store.list_sizes(), 1))
        for path, num_bytes in found:
            store.read_range(path, 0, min(num_bytes, 1))
    except (UserError, TransientError, MissingObjectError) as error:
        todo = error.todo or "see the message"
        return Finding(name="S3", status="fault", found=error.what, allowed=error.allowed, todo=todo)
    except EOFError as error:
        return Finding(name="S3", status="fault", found=str(error), todo="see the message")
    if not found:
        todo = "check the prefix, if something should be there"
        return Finding(name="S3", status="warning", found=f"{shown_value(url)} answers; it has no objects", todo=todo)
    return Finding(name="S3", status="ok", found=f"{shown_value(url)} can be listed and read")


def product_seconds(device: "torch.device") -> float:
    """Returns the median seconds of a product of square matrices, in bf16 on GPUs and fp32 on CPUs. The first product
    is not counted."""
    import torch  # noqa: PLC0415

    side = _SIDE.get(device.type, _SIDE["cpu"])
    kind = torch.bfloat16 if device.type == "cuda" else torch.float32
    first = torch.randn(side, side, device=device, dtype=kind)
    taken = []
    for _ in range(_REPEATS + 1):
        began = time.perf_counter()
        product = first @ first
        float(product[0, 0])  # waits for the device
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[1:])


def exchange(world: "World") -> str:
    """Sums a number over all ranks. Returns why that failed, or "" if the sum is right."""
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    from pipeline.ranks.environment import TimeLimits  # noqa: PLC0415
    from pipeline.ranks.world import joined  # noqa: PLC0415

    limits = TimeLimits(join_seconds=_EXCHANGE_SECONDS, exchange_seconds=_EXCHANGE_SECONDS)
    try:
        with joined(world, limits=limits):
            total = torch.ones(1, device=world.device)
            dist.all_reduce(total)
            found = int(total.item())
    except (TransientError, UserError, dist.DistError) as error:
        return " ".join(str(error).split())[:300]
    return "" if found == world.num_ranks else f"the sum over {world.num_ranks} ranks is {found}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
