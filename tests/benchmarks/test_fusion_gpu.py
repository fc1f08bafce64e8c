"""What the lowering to a GPU says, which needs no GPU."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import cast

import pytest

from benchmarks import fusion_gpu


@pytest.mark.parametrize(
    ("warps", "registers", "shared_bytes", "resident"),
    [
        pytest.param(8, 32, 0, 64, id="all"),
        pytest.param(8, 33, 0, 48, id="40 registers a thread, given in units of 256 a warp"),
        pytest.param(8, 64, 0, 32, id="a warp takes an eighth of a part's registers"),
        pytest.param(8, 72, 0, 24, id="28 warps fit, and 24 are whole groups"),
        pytest.param(4, 255, 0, 8, id="two warps in each part"),
        pytest.param(1, 16, 0, 32, id="32 groups at most"),
        pytest.param(8, 32, 32_800, 48, id="six groups of 32,800 bytes and 1 KB each"),
        pytest.param(4, 32, 232_448, 4, id="the most shared memory of a group"),
        pytest.param(32, 128, 0, 0, id="a group that does not fit"),
        pytest.param(32, 64, 0, 32, id="a group that fills all registers"),
    ],
)
def test_the_warps_of_an_sm_are_counted_as_nvidia_counts_them(
    warps: int, registers: int, shared_bytes: int, resident: int
) -> None:
    assert fusion_gpu.resident_warps(warps=warps, registers=registers, shared_bytes=shared_bytes) == resident


@pytest.mark.long
@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton: pip install --target runs/triton triton==3.7.1")
def test_fused_sums_and_products_read_less(tmp_path: Path) -> None:
    """In a process of its own, since torch asks once whether there is Triton."""
    out = tmp_path / "found.json"
    subprocess.run([sys.executable, "-m", "benchmarks.fusion_gpu", "--out", out], check=True, timeout=300)
    ways = json.loads(out.read_text())["ways"]
    kept, fused = (fusion_gpu.Lowered(**ways[way]) for way in ("sums kept", "sums kept, biases' sums fused"))
    assert sum(fused.launches) <= sum(kept.launches)
    assert fused.gigabytes("triton", "parts") < 0.85 * kept.gigabytes("triton", "parts")
    assert fused.kept_megabytes == kept.kept_megabytes
    assert max(fused.said("spilled bytes")) == 0
    packed = fusion_gpu.Lowered(**ways["sums kept, gradients of q, k, v packed"])
    copied_gigabytes = 2 * 2 * 256 * 257 * 3 * 1280 / 1e9  # dq, dk and dv, read and written in bf16
    saved = kept.gigabytes("triton", "parts") - packed.gigabytes("triton", "parts")
    assert saved == pytest.approx(copied_gigabytes, abs=0.01)
    assert packed.gigabytes("attention") == pytest.approx(kept.gigabytes("attention"), abs=0.01)
    assert not any("stack" in name for names in packed.kernels.values() for name in names)
    without, fused = kept, fusion_gpu.Lowered(**ways["sums kept, MLP fused"])
    assert fused.gigabytes("triton", "parts") < 5.5 < without.gigabytes("triton", "parts")
    # Per pass, as the benchmark's docstring says: one more tensor of the hidden layer, and a sum of each 128 tokens.
    hidden_megabytes = 2 * 256 * 257 * 5120 / 1e6
    for phase in ("forward", "backward"):
        before, after = (cast("float", way.megabytes[phase]["products"]) for way in (without, fused))
        assert after - before == pytest.approx(hidden_megabytes, abs=0.1), phase
    assert fused.kept_megabytes == without.kept_megabytes
