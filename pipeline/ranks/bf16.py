"""Whether a device computes bf16 with instructions of its own, and how slow it is if it does not. Pure.

PyTorch cannot tell: `torch.cpu` lists what the CPU has, even if oneDNN was told not to use it, and oneDNN claims to
support bf16 on every CPU with AVX-512, although it converts each number to fp32 and back.
"""

from collections.abc import Mapping
from dataclasses import dataclass

_LEAST_MAJOR = 8  # compute capability of the first GPUs with bf16 (Ampere)
# ONEDNN_MAX_CPU_ISA's words for CPUs without AVX-512, with it but not for bf16, and for bf16 but without AMX.
_BELOW_AVX512 = {"sse41", "avx", "avx2", "avx2_vnni", "avx2_vnni_2"}
_BELOW_BF16 = {"avx512_core", "avx512_core_vnni"}
_BELOW_AMX = {"avx512_core_bf16", "avx512_core_fp16"}


@dataclass(frozen=True, kw_only=True)
class Bf16:
    """`reason`: a sentence that explains it, such as "this CPU computes bf16 natively (AVX512-BF16)"."""

    is_native: bool
    reason: str


def bf16_of_gpu(name: str, *, capability: tuple[int, int]) -> Bf16:
    """By the GPU's name and compute capability."""
    number = f"compute capability {capability[0]}.{capability[1]}"
    if capability[0] >= _LEAST_MAJOR:
        return Bf16(is_native=True, reason=f"{name} computes bf16 natively ({number})")
    return Bf16(is_native=False, reason=f"{name} ({number}) emulates bf16, slower than fp32")


def bf16_of_cpu(flags: frozenset[str], environ: Mapping[str, str]) -> Bf16:
    """By the CPU's flags, without those that the environment tells PyTorch or oneDNN not to use.

    With ONEDNN_MAX_CPU_ISA and ATEN_CPU_CAPABILITY a CPU acts as an older one. The factors are of a training step of
    digits_smoke.
    """
    flags = _used(flags, environ)
    if "bf16" in flags:
        return Bf16(is_native=True, reason="this CPU computes bf16 natively (Arm BF16)")
    if "amx_bf16" in flags:
        return Bf16(is_native=True, reason="this CPU computes bf16 natively (AMX)")
    if "avx512_bf16" in flags:
        return Bf16(is_native=True, reason="this CPU computes bf16 natively (AVX512-BF16)")
    if "avx512f" in flags:
        return Bf16(is_native=False, reason="this CPU (AVX-512 without BF16) computes bf16 1.3 times slower than fp32")
    if "avx2" in flags:
        return Bf16(is_native=False, reason="this CPU (AVX2) computes bf16 8 times slower than fp32")
    return Bf16(is_native=False, reason="this CPU has no bf16 instructions and computes it several times slower")


def flags_of(cpuinfo: str) -> frozenset[str]:
    """The flags in the text of /proc/cpuinfo: `flags` on x86, `Features` on Arm; none if it has neither."""
    for line in cpuinfo.splitlines():
        name, _, words = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(words.split())
    return frozenset()


def _used(flags: frozenset[str], environ: Mapping[str, str]) -> frozenset[str]:
    """oneDNN reads its own name before the older one, in any case of letters."""
    isa = (environ.get("ONEDNN_MAX_CPU_ISA") or environ.get("DNNL_MAX_CPU_ISA") or "").lower()
    if "sse2" not in flags:  # Arm: these words are of x86
        return flags
    if isa in _BELOW_AVX512 or environ.get("ATEN_CPU_CAPABILITY") in ("default", "avx2"):
        return frozenset(flag for flag in flags if not flag.startswith(("avx512", "amx")))
    if isa in _BELOW_BF16:
        return flags - {"avx512_bf16", "amx_bf16"}
    return flags - {"amx_bf16"} if isa in _BELOW_AMX else flags
