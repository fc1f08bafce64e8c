"""Fuzzes the C files of pipeline/data with clang's libFuzzer, and writes what became of it to tests/fuzz/results/.

python -m tests.fuzz.crop_decoder --seconds 600
python -m tests.fuzz.crop_decoder --seconds 600 --libjpeg PREFIX              # another libjpeg-turbo, built as below
python -m tests.fuzz.crop_decoder --seconds 600 --libjpeg PREFIX --sanitizer memory

Views of crops are compared with full decodes, to the bit. The sanitizers are AddressSanitizer and UBSan, or
MemorySanitizer, which finds memory that is read before it is written and needs a libjpeg-turbo that is built with it.
SOURCE is libjpeg-turbo's, of any version from 2.1 on:

cmake -S SOURCE -B build -DCMAKE_INSTALL_PREFIX=PREFIX -DENABLE_SHARED=OFF -DCMAKE_POSITION_INDEPENDENT_CODE=ON
cmake --build build --target install
CC=clang CFLAGS='-fsanitize=memory -g -O1' cmake -S SOURCE -B build-msan -DCMAKE_INSTALL_PREFIX=PREFIX \
    -DENABLE_SHARED=OFF -DWITH_SIMD=OFF -DWITH_TURBOJPEG=OFF -DCMAKE_BUILD_TYPE=None
"""

import argparse
import hashlib
import io
import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image

from hatch_build import FOLDER, sources_digest, sources_in
from tests.pipeline.data.test_crop_decoder import DENSE, dense_jpeg
from tests.rigs.coded_jpegs import SAMPLINGS, coded_jpeg
from tests.rigs.jpegs import KINDS, jpeg_of

CHECKOUT = Path(__file__).resolve().parents[2]
HARNESS = Path(__file__).with_name("crop_decoder_harness.c")
RESULTS = Path(__file__).parent / "results"
KEPT = Path(__file__).parent / "cases"
PLAN_BYTES = 64  # NUM_PLAN_BYTES of the harness
MOST_BYTES = 20_000  # of an input
SANITIZERS = {"address": "-fsanitize=fuzzer,address,undefined", "memory": "-fsanitize=fuzzer,memory -DPORTABLE"}
_EXECUTIONS = re.compile(r"stat::number_of_executed_units:\s*(\d+)")
_COVERED = re.compile(r"cov: (\d+)")


def compiler() -> str:
    """clang, or an empty string if it is missing or has no libFuzzer (Debian: clang libclang-rt-14-dev)."""
    found = shutil.which("clang")
    if not found:
        return ""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "a.c"
        source.write_text("int LLVMFuzzerTestOneInput(const char *a, unsigned long b) { return a && b ? 0 : 0; }\n")
        done = subprocess.run(
            [found, "-fsanitize=fuzzer,address", source, "-o", source.with_suffix("")], capture_output=True, check=False
        )
    return "" if done.returncode else found


def build(folder: Path, *, sanitizer: str, libjpeg: Path | None) -> Path:
    """The fuzzer as a program in `folder`. Raises CalledProcessError, with the compiler's words, if it is none."""
    program = folder / "fuzzer"
    sources = [str(source) for source in sources_in(CHECKOUT / FOLDER) if source.suffix == ".c"]
    linked = (
        [f"-I{libjpeg}/include", f"-L{libjpeg}/lib", f"-L{libjpeg}/lib64", "-l:libjpeg.a"] if libjpeg else ["-ljpeg"]
    )
    flags = f"-std=c11 -g -O1 -D_GNU_SOURCE {SANITIZERS[sanitizer]} -fno-sanitize-recover=all"
    include, *libraries = linked if libjpeg else ("", *linked)
    subprocess.run(
        [
            *(
                "clang",
                *flags.split(),
                *filter(None, [include]),
                f"-I{CHECKOUT / FOLDER}",
                '-DCROP_DECODER_SOURCES="fuzzed"',
            ),
            *(str(HARNESS), *sources, "-o", str(program), *libraries, "-lm"),
        ],
        check=True,
        capture_output=True,
        text=True,
    )
    return program


def corpus() -> Iterator[bytes]:
    """JPEGs to begin with: all samplings, scans, Huffman tables, 1 to 4 components, and images of a line."""
    for seed, (height, width) in enumerate([(24, 32), (97, 131), (1, 700), (700, 1), (3, 3)]):
        for kind in KINDS:
            yield jpeg_of(kind, height=height, width=width, seed=seed)
        yield _scans(height, width, seed)
    for seed, kind in enumerate(DENSE):
        yield dense_jpeg(kind, height=60, width=50, seed=seed)
    for seed, sampling in enumerate([*SAMPLINGS] * 6):
        yield coded_jpeg(random.Random(seed), sampling=sampling).data


def _scans(height: int, width: int, seed: int) -> bytes:
    """A progressive CMYK JPEG: four components, and many scans."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 4), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels, "CMYK").save(file, "JPEG", progressive=True, quality=60)
    return file.getvalue()


def run(program: Path, folder: Path, *, seconds: int, seed: int) -> tuple[int, int, str]:
    """How many inputs were executed, the number of places in the code that were reached, and what was wrong (empty if
    nothing was). The input that shows it is kept in tests/fuzz/cases/."""
    inputs = folder / f"inputs-{seed}"
    inputs.mkdir()
    rng = random.Random(seed)
    for data in corpus():
        if len(data) + PLAN_BYTES <= MOST_BYTES:
            for _ in range(3):
                whole = rng.randbytes(PLAN_BYTES) + data
                (inputs / hashlib.sha256(whole).hexdigest()[:16]).write_bytes(whole)
    done = subprocess.run(
        [
            *(program, inputs, f"-max_total_time={seconds}", f"-seed={seed}", f"-max_len={MOST_BYTES}", "-timeout=20"),
            *("-rss_limit_mb=2048", "-print_final_stats=1", f"-artifact_prefix={folder}/found-{seed}-"),
        ],
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        env=os.environ | {"ASAN_OPTIONS": "allocator_may_return_null=1"},
    )
    executions, covered = _EXECUTIONS.search(done.stderr), _COVERED.findall(done.stderr)
    for path in folder.glob(f"found-{seed}-*"):
        shutil.copy(path, KEPT / f"crop-decoder-{path.name.rpartition('-')[2][:8]}.bin")
    wrong = "" if done.returncode == 0 else done.stderr[-4000:]
    return int(executions[1]) if executions else 0, max(map(int, covered), default=0), wrong


def main() -> int:
    """1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--libjpeg", type=Path, help="the folder with include/ and lib/ of a libjpeg-turbo; else the system's"
    )
    parser.add_argument("--sanitizer", choices=list(SANITIZERS), default="address")
    options = parser.parse_args()
    if not compiler():
        sys.exit("clang with libFuzzer is missing (Debian: apt-get install clang libclang-rt-14-dev)")
    began, jobs = time.monotonic(), len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        program = build(Path(folder), sanitizer=options.sanitizer, libjpeg=options.libjpeg)
        with ThreadPoolExecutor(jobs) as pool:
            seeds = range(options.seed, options.seed + jobs)
            found = list(pool.map(lambda seed: run(program, Path(folder), seconds=options.seconds, seed=seed), seeds))
    wrong = [words for *_, words in found if words]
    version = _headers_version(options.libjpeg)
    arguments = ["PREFIX" if word == str(options.libjpeg) else word for word in sys.argv[1:]]
    result = {
        "command": f"python -m tests.fuzz.crop_decoder {shlex.join(arguments)}".strip(),
        "libjpeg-turbo": version,
        "sanitizers": SANITIZERS[options.sanitizer],
        "sources": sources_digest(CHECKOUT / FOLDER),
        "seconds": round(time.monotonic() - began),
        "processes": jobs,
        "executions": sum(executions for executions, *_ in found),
        "covered": max(covered for _, covered, _ in found),
        "failures": len(wrong),
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"crop-decoder-{version}-{options.sanitizer}.json").write_text(json.dumps(result, indent=1) + "\n")
    sys.stdout.write("\n".join([*wrong, json.dumps(result, indent=1), ""]))
    return 1 if wrong else 0


def _headers_version(libjpeg: Path | None) -> str:
    """Of the headers that the fuzzer is compiled with."""
    flags = [f"-I{libjpeg}/include"] if libjpeg else []
    done = subprocess.run(
        ["clang", *flags, "-E", "-x", "c", "-"],
        input="#include <stdio.h>\n#include <jpeglib.h>\nLIBJPEG_TURBO_VERSION\n",
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()[-1]


if __name__ == "__main__":
    sys.exit(main())
