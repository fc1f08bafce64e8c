"""Under the compiler's sanitizers, damaged JPEGs make the crop decoder read and write nothing that is not its own."""

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import hatch_build
from pipeline.data import crop_decoder as module
from pipeline.data.augment import Viewport
from pipeline.data.crop_decoder import LIBRARY_NAME, SOURCES, CropDecoder
from pipeline.data.decode import turn_of
from pipeline.data.transform import crop_decoder
from pipeline.data.view_plan import Box, ViewPlan
from tests.pipeline.data.test_crop_decoder import DENSE, damaged, dense_jpeg
from tests.rigs.jpegs import KINDS, jpeg_of

CHECKOUT = Path(__file__).resolve().parents[3]
NUM_CASES = 100_000
SANITIZERS = "-fsanitize=address,undefined -fno-sanitize-recover=all"


@pytest.mark.long
def test_damaged_jpegs_under_sanitizers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if crop_decoder() is None:
        pytest.skip("the crop decoder was not built: a C compiler and libjpeg-turbo's headers make it")
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("the sanitizers' libraries are asked for as gcc names them")
    found = subprocess.run([compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    for name in SOURCES:
        shutil.copy(Path(module.__file__).parent / name, tmp_path)
    monkeypatch.setenv("CC", compiler)
    monkeypatch.setenv("CFLAGS", f"{SANITIZERS} -g")
    assert not hatch_build.build(tmp_path)
    environment = os.environ | {"LD_PRELOAD": found.stdout.strip(), "ASAN_OPTIONS": "detect_leaks=0"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.pipeline.data.test_sanitizers", str(tmp_path / LIBRARY_NAME)],
        env=environment,
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    assert done.stdout == f"{NUM_CASES} cases\n"


def main(path: Path) -> None:
    """Gives whole and damaged JPEGs to the library at `path`, which must make of them what the usual one makes."""
    rng, sanitized, usual = random.Random(0), CropDecoder(path), crop_decoder()
    assert usual
    for number in range(NUM_CASES):
        height, width = rng.randint(1, 150), rng.randint(1, 150)
        kind = rng.choice([*KINDS, *DENSE])
        data = (dense_jpeg if kind in DENSE else jpeg_of)(kind, height=height, width=width, seed=number)
        if rng.random() < 0.7:
            data = harmed(data, rng)
        plan = any_plan(height, width, rng)
        views = np.zeros((2, plan.viewport.height, plan.viewport.width, 3), dtype=np.uint8)
        is_done = [one.fill(data, plan, out=out) for one, out in zip((sanitized, usual), views, strict=True)]
        assert is_done[0] == is_done[1], f"{kind}, case {number}"
        assert not is_done[0] or np.array_equal(*views), f"{kind}, case {number}"
    sys.stdout.write(f"{NUM_CASES} cases\n")


def harmed(data: bytes, rng: random.Random) -> bytes:
    """With damage in the coded data or, less often, anywhere."""
    if len(data) - data.index(b"\xff\xda") > 30 and rng.random() < 0.8:
        return damaged(data, rng)
    changed = bytearray(data)
    changed[rng.randrange(2, len(data))] = rng.randrange(256)
    return bytes(changed)


def any_plan(height: int, width: int, rng: random.Random) -> ViewPlan:
    """Any view of an image of height x width."""
    denominator = rng.choice([1, 1, 2, 8])
    tall, broad = -(-height // denominator), -(-width // denominator)
    top, left = rng.randrange(tall), rng.randrange(broad)
    size = rng.choice([1, 16, 64])
    return ViewPlan(
        stored_height=height,
        stored_width=width,
        denominator=denominator,
        box=Box(top=top, left=left, height=rng.randint(1, tall - top), width=rng.randint(1, broad - left)),
        turn=turn_of(rng.randint(1, 8)),
        viewport=Viewport(height=size, width=size, is_antialiased=rng.random() < 0.5, is_mirrored=rng.random() < 0.5),
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
