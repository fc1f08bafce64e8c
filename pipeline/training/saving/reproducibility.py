"""What the bits of a run depend on beside its job: where it computes, and with which kernels.

A checkpoint records it. A run that resumes elsewhere reads the same samples and computes the same step, but adds in
another order somewhere; one line says so.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from pipeline.ranks.world import World
from pipeline.training.settings.job import EngineConfig

log = logging.getLogger(__name__)
BITS = "bits"  # its place in a checkpoint's record
Bits = dict[str, Any]
_CPUINFO, _NVIDIA = Path("/proc/cpuinfo"), Path("/proc/driver/nvidia/version")
_WORDS = {
    "device": "device",
    "driver": "driver",
    "torch": "PyTorch",
    "num_ranks": "ranks",
    "ranks_per_node": "ranks per node",
    "num_threads": "threads per rank",
    "deterministic": "engine.deterministic",
    "deepspeed": "DeepSpeed",
    "zero_stage": "engine.zero_stage",
    "precision": "engine.precision",
    "reduce_precision": "engine.reduce_precision",
    "reduce_bucket": "engine.reduce_bucket",
    "micro_batch": "images per pass",
    "is_compiled": "compiled blocks",
    "attention": "engine.attention",
    "float8": "engine.float8",
}
_GPU_ONLY = {"ranks_per_node", "deterministic"}  # on CPUs they change nothing: gloo's order of adding knows no nodes


def say_bits(world: World, config: EngineConfig, record: Mapping[str, Any], *, resumed: Mapping[str, Any]) -> Bits:
    """What a checkpoint records of it. Rank 0 says what it promises, and, if the checkpoint that the run resumes from
    has recorded something else, that its results will not have the bits of an unbroken run. `record`: what else a
    checkpoint of this run records; `resumed`: the record of that checkpoint, or nothing."""
    bits = bits_of(world, deterministic=config.deterministic)
    now = {**record, BITS: bits}
    lines = words_of_choice(world, deterministic=config.deterministic), differences_in_bits(resumed, now)
    for line in filter(None, lines if world.is_first else ()):
        log.info("%s", line)
    return bits


def bits_of(world: World, *, deterministic: bool) -> Bits:
    """This rank's. All ranks are taken to be like this one: ranks that differ are refused at the start."""
    is_gpu = world.device.type == "cuda"
    return {
        "device_type": world.device.type,
        "device": torch.cuda.get_device_name(world.device) if is_gpu else _cpu_model(_text(_CPUINFO)),
        "driver": _text(_NVIDIA).partition("\n")[0].strip() if is_gpu else "",
        "torch": torch.__version__,
        "num_ranks": world.num_ranks,
        "ranks_per_node": world.num_local_ranks,
        "num_threads": world.num_threads,
        "deterministic": deterministic,
    }


def words_of_choice(world: World, *, deterministic: bool) -> str:
    """What holds on this device, in one line; empty on a CPU, whose kernels are deterministic."""
    if world.device.type != "cuda":
        return ""
    if deterministic:
        return "deterministic kernels: a resumed run has the bits of an unbroken one on this GPU model and node layout"
    return "a resumed run will equal an unbroken one to rounding; --engine.deterministic gives equal bits, more slowly"


def differences_in_bits(record: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """One line that says why this run's bits will differ from an unbroken one's; empty if nothing is known that makes
    them differ. `record`: of the checkpoint that it resumes from; `now`: of those to come."""
    before, after = _facts(record), _facts(now)
    is_gpu = after.get("device_type") == "cuda"
    changed = [
        f"{words} {before[name]}, now {after[name]}"
        for name, words in _WORDS.items()
        if name in before and name in after and before[name] != after[name] and (is_gpu or name not in _GPU_ONLY)
    ]
    return f"this run will equal an unbroken one to rounding at best: {'; '.join(changed)}" if changed else ""


def _facts(record: Mapping[str, Any]) -> dict[str, Any]:
    """All that a record says of bits."""
    bits, engine, versions = (_mapping(record.get(name)) for name in (BITS, "engine", "versions"))
    return engine | bits | {name: versions[name] for name in ("deepspeed",) if name in versions}


def _mapping(value: object) -> dict[str, Any]:
    return dict(value) if isinstance(value, dict) else {}


def _cpu_model(cpuinfo: str) -> str:
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return ""


def _text(path: Path) -> str:
    return path.read_text() if path.is_file() else ""
