"""How much memory a host has left, by /proc and the control groups of both versions, and which devices compute bf16."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from pipeline.ranks.host import available_bytes, bf16_of_cpu, bf16_of_gpu, flags_of

GB = 1 << 30
V2 = {"cgroup": "0::/slurm/job\n", "slurm/job/memory.max": "max\n"}
AVX2 = frozenset({"sse2", "avx", "avx2", "fma"})
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512_vnni"}
BF16 = AVX512 | {"avx512_bf16"}
AMX = BF16 | {"amx_tile", "amx_bf16", "amx_int8"}
ARM = frozenset({"fp", "asimd", "sve"})


def put(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.mark.parametrize(
    ("files", "gigabytes"),
    [
        pytest.param({}, 8, id="no groups"),
        pytest.param({"cgroup": "0::/\n"}, 8, id="the top group has no limit"),
        pytest.param(
            V2 | {"slurm/memory.max": f"{5 * GB}\n", "slurm/memory.current": f"{2 * GB}\n"}, 3, id="a group above"
        ),
        pytest.param(
            {
                "cgroup": "0::/job\n",
                "job/memory.max": f"{5 * GB}",
                "job/memory.current": f"{4 * GB}",
                "job/memory.stat": f"anon 7\ninactive_file {2 * GB}\n",
            },
            3,
            id="page cache can be taken back",
        ),
        pytest.param(
            {"cgroup": "0::/job\n", "job/memory.max": "5", "job/memory.current": "9"}, 0, id="above its limit"
        ),
        pytest.param({"cgroup": "0::/../..\n", "memory.max": f"{GB}", "memory.current": "0"}, 1, id="a container"),
        pytest.param(
            {
                "cgroup": "5:cpu:/a\n4:memory:/a\n0::/\n",
                "memory/a/memory.limit_in_bytes": f"{6 * GB}",
                "memory/a/memory.usage_in_bytes": f"{3 * GB}",
                "memory/a/memory.stat": f"total_inactive_file {GB}\n",
            },
            4,
            id="version 1",
        ),
        pytest.param(
            {
                "cgroup": "0::/job\n",
                "memory/memory.limit_in_bytes": f"{6 * GB}",
                "memory/memory.usage_in_bytes": f"{3 * GB}",
            },
            3,
            id="version 1, in a container",
        ),
        pytest.param(
            {
                "cgroup": "0::/job\n",
                "memory.max": f"{4 * GB}",
                "memory.current": f"{3 * GB}",
                "memory.stat": f"anon 7\ninactive_file {GB}\n",
                "job/memory.max": f"{5 * GB}",
                "job/memory.current": f"{2 * GB}",
            },
            2,
            id="the tightest, less what the page cache can give back",
        ),
        pytest.param(
            {"cgroup": "0::/job\n", "job/memory.max": "-3\n", "job/memory.current": "x\n"}, 8, id="no numbers"
        ),
        pytest.param({"cgroup": "0::/job\n", "meminfo": "MemAvailable: lots\n"}, 1 << 30, id="nothing known"),
    ],
)
def test_the_least_of_all_counts(tmp_path: Path, files: dict[str, str], gigabytes: int) -> None:
    put(tmp_path, {"meminfo": f"MemTotal: 99 kB\nMemAvailable:    {8 * GB // 1024} kB\n", **files})
    found = available_bytes(meminfo=tmp_path / "meminfo", groups=tmp_path / "cgroup", mount=tmp_path)
    assert found == gigabytes * GB


def test_this_host_has_some() -> None:
    assert 1 << 20 < available_bytes() < 1 << 50


@pytest.mark.parametrize(
    ("flags", "environ", "is_native", "words"),
    [
        pytest.param(AVX2, {}, False, "this CPU (AVX2) computes bf16 8 times slower than fp32", id="AVX2"),
        pytest.param(AVX512, {}, False, "(AVX-512 without BF16) computes bf16 1.3 times slower", id="AVX-512"),
        pytest.param(BF16, {}, True, "natively (AVX512-BF16)", id="AVX512-BF16"),
        pytest.param(AMX, {}, True, "natively (AMX)", id="AMX"),
        pytest.param(ARM | {"bf16"}, {}, True, "natively (Arm BF16)", id="Arm with BF16"),
        pytest.param(ARM, {}, False, "no bf16 instructions", id="Arm without"),
        pytest.param(frozenset({"sse2"}), {}, False, "no bf16 instructions", id="an old x86"),
        pytest.param(frozenset(), {}, False, "no bf16 instructions", id="a system that does not say"),
        pytest.param(AMX, {"ONEDNN_MAX_CPU_ISA": "AVX2"}, False, "(AVX2)", id="oneDNN held to AVX2"),
        pytest.param(AMX, {"ONEDNN_MAX_CPU_ISA": "avx2_vnni"}, False, "(AVX2)", id="in small letters"),
        pytest.param(AMX, {"DNNL_MAX_CPU_ISA": "AVX2"}, False, "(AVX2)", id="oneDNN's older name"),
        pytest.param(
            AMX, {"ONEDNN_MAX_CPU_ISA": "ALL", "DNNL_MAX_CPU_ISA": "AVX2"}, True, "(AMX)", id="the newer name wins"
        ),
        pytest.param(AMX, {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI"}, False, "(AVX-512 without", id="held to AVX-512"),
        pytest.param(AMX, {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}, True, "(AVX512-BF16)", id="held below AMX"),
        pytest.param(AMX, {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_AMX"}, True, "(AMX)", id="held to what it has"),
        pytest.param(BF16, {"ATEN_CPU_CAPABILITY": "avx2"}, False, "(AVX2)", id="PyTorch held to AVX2"),
        pytest.param(BF16, {"ATEN_CPU_CAPABILITY": "avx512"}, True, "(AVX512-BF16)", id="PyTorch held to AVX-512"),
        pytest.param(ARM | {"bf16"}, {"ATEN_CPU_CAPABILITY": "default"}, True, "(Arm BF16)", id="words of x86 on Arm"),
    ],
)
def test_cpus(flags: frozenset[str], environ: Mapping[str, str], is_native: bool, words: str) -> None:
    found = bf16_of_cpu(flags, environ)
    assert (found.is_native, words in found.reason) == (is_native, True), found


@pytest.mark.parametrize(
    ("name", "capability", "is_native", "reason"),
    [
        ("Tesla T4", (7, 5), False, "Tesla T4 (compute capability 7.5) emulates bf16, slower than fp32"),
        ("NVIDIA A100", (8, 0), True, "NVIDIA A100 computes bf16 natively (compute capability 8.0)"),
        ("NVIDIA H200", (9, 0), True, "NVIDIA H200 computes bf16 natively (compute capability 9.0)"),
    ],
)
def test_gpus(name: str, capability: tuple[int, int], is_native: bool, reason: str) -> None:
    found = bf16_of_gpu(name, capability=capability)
    assert (found.is_native, found.reason) == (is_native, reason)


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("processor\t: 0\nflags\t\t: fpu avx2\nbugs\t: x\n\nflags\t\t: other\n", {"fpu", "avx2"}),
        ("processor\t: 0\nFeatures\t: fp bf16\n", {"fp", "bf16"}),
        ("", set()),
    ],
)
def test_flags_are_those_of_the_first_cpu(text: str, flags: set[str]) -> None:
    assert flags_of(text) == flags


def test_this_machine_has_flags() -> None:
    assert flags_of(Path("/proc/cpuinfo").read_text())
