"""Under the compiler's sanitizers, damaged JPEGs make the crop decoder read and write nothing that is not its own."""

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import simplejpeg

import hatch_build
from pipeline.data import crop_decoder as module
from pipeline.data.augment import Box, ViewPlan, Viewport
from pipeline.data.crop_decoder import LIBRARY_NAME, CropDecoder, sources_in
from pipeline.data.decode import DecodeError, Pixels, decode_stored, scaled_size, turn_of, turned
from pipeline.data.transform import crop_decoder
from pipeline.data.window_resize import show
from tests.fuzz import crop_decoder as fuzzer
from tests.pipeline.data.test_crop_decoder import DENSE, damaged, dense_jpeg
from tests.rigs.coded_jpegs import CodedJpeg, coded_jpeg
from tests.rigs.jpegs import KINDS, jpeg_of

CHECKOUT = Path(__file__).resolve().parents[3]
NUM_CASES = 20_000
SANITIZERS = "-fsanitize=address,undefined -fno-sanitize-recover=all -g"


@pytest.mark.long
def test_damaged_jpegs_under_sanitizers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library, decoding all Huffman codes itself or none of them, shows what a full decode shows."""
    if crop_decoder() is None:
        pytest.skip("the crop decoder was not built: a C compiler and libjpeg-turbo's headers make it")
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("the sanitizers' libraries are asked for as gcc names them")
    monkeypatch.setenv("CC", compiler)
    monkeypatch.setenv("CFLAGS", SANITIZERS)
    library = library_in(tmp_path / "library")
    found = subprocess.run([compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    done = subprocess.run(
        [sys.executable, "-m", "tests.pipeline.data.test_sanitizers", str(library)],
        env=os.environ | {"LD_PRELOAD": found.stdout.strip(), "ASAN_OPTIONS": "detect_leaks=0"},
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    assert done.stdout == f"{NUM_CASES} cases\n"


@pytest.mark.long
def test_the_fuzzer_finds_nothing(tmp_path: Path) -> None:
    """Half a minute; `make fuzz-c` is the campaign. With another sampling or scale it failed within a second."""
    if not fuzzer.compiler():
        pytest.skip("clang with libFuzzer is missing (Debian: clang libclang-rt-14-dev)")
    program = fuzzer.build(tmp_path, sanitizer="address", libjpeg=None)
    executions, _, wrong = fuzzer.run(program, tmp_path, seconds=30, seed=1)
    assert not wrong, wrong
    assert executions > 1000


def library_in(folder: Path) -> Path:
    """Builds the library in `folder`. Its own decoder of Huffman codes takes JPEGs of any size."""
    folder.mkdir()
    for source in sources_in(Path(module.__file__).parent):
        shutil.copy(source, folder)
    changed = folder / "crop_decoder.c"
    text = changed.read_text()
    assert text.count("LEAST_BYTES = 4096") == 1
    changed.write_text(text.replace("LEAST_BYTES = 4096", "LEAST_BYTES = 0"))
    assert not hatch_build.build(folder)
    return folder / LIBRARY_NAME


def main(path: str) -> None:
    """Compares views of whole and damaged JPEGs with those of full decodes."""
    rng, library = random.Random(0), CropDecoder(Path(path))
    num_done = num_left = num_compared = 0
    for number in range(NUM_CASES):
        is_whole = rng.random() < 0.4
        jpeg = any_jpeg(rng, seed=number)
        data = jpeg.data if is_whole else harmed(jpeg, rng)
        plan = any_plan(jpeg.height, jpeg.width, rng)
        views = np.zeros((2, plan.viewport.height, plan.viewport.width, 3), dtype=np.uint8)
        if library.fill(data, plan, out=views[0], leaves_huffman=rng.random() < 0.3):
            num_done += 1
            whole = whole_image(data, jpeg, plan.denominator)
            if whole is not None:
                num_compared += 1
                box = plan.box
                part = whole[box.top : box.top + box.height, box.left : box.left + box.width]
                show(turned(part, plan.turn), plan.viewport, out=views[1])
                assert np.array_equal(*views), f"case {number}"
        elif is_whole:
            num_left += 1
    assert num_done > NUM_CASES / 2, f"{num_done} are decoded"
    assert num_compared > 0.95 * num_done, f"{num_compared} of {num_done} are compared"
    assert num_left < NUM_CASES / 8, f"{num_left} whole ones are left to others, unusual samplings among them"
    sys.stdout.write(f"{NUM_CASES} cases\n")


def whole_image(data: bytes, jpeg: CodedJpeg, denominator: int) -> Pixels | None:
    """A full decode, whatever warnings there are; None if the size was damaged, or nothing decodes it."""
    low, narrow = scaled_size(jpeg.height, jpeg.width, denominator)
    try:
        pixels = simplejpeg.decode_jpeg(
            data, colorspace="RGB", min_height=low, min_width=narrow, min_factor=denominator, strict=False
        )
    except (ValueError, KeyError):
        try:
            pixels = decode_stored(data, height=jpeg.height, width=jpeg.width, denominator=denominator)
        except DecodeError:
            return None
    return pixels if pixels.shape[:2] == (low, narrow) else None


def any_jpeg(rng: random.Random, *, seed: int) -> CodedJpeg:
    """A whole JPEG of any kind."""
    if rng.random() < 0.5:
        return coded_jpeg(rng)
    height, width, kind = rng.randint(1, 150), rng.randint(1, 150), rng.choice([*KINDS, *DENSE])
    data = (dense_jpeg if kind in DENSE else jpeg_of)(kind, height=height, width=width, seed=seed)
    return CodedJpeg(data=data, height=height, width=width, scan=data.index(b"\xff\xda") + 14)


def harmed(jpeg: CodedJpeg, rng: random.Random) -> bytes:
    """With damage in the coded data or, less often, anywhere."""
    data, scan = jpeg.data, jpeg.scan
    if rng.random() < 0.1:
        return data[:scan] + rng.choice([b"\xff\x00", b"\0", b"\x55"]) * rng.randint(0, 2000) + b"\xff\xd9"
    if len(data) - scan > 16 and rng.random() < 0.8:
        return damaged(data, rng)
    changed = bytearray(data)
    changed[rng.randrange(2, len(data))] = rng.randrange(256)
    return bytes(changed)


def any_plan(height: int, width: int, rng: random.Random) -> ViewPlan:
    """Any view of an image of height x width."""
    denominator = rng.choice([1, 1, 2, 4, 8])
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
    main(sys.argv[1])
