"""Builds the crop decoder of pipeline/data if there are a C compiler and libjpeg-turbo's headers; otherwise continues
without it.

pip runs this for wheels and editable installs. The library is optional: without it, decoding takes longer and gives the
same pixels. `python hatch_build.py` builds it in a checkout; CC, CFLAGS, CPPFLAGS and LDFLAGS work as usual.

libjpeg-turbo is linked statically if the compiler finds the headers of version 3.1 or newer and a libjpeg.a made with
-fPIC beside them; otherwise the system's libjpeg is loaded at run time. docs/reference/streaming.md shows how to build
one.
"""

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # only pip's build environment has it
    BuildHookInterface = object

FOLDER = "pipeline/data"
LIBRARY = "libcrop_decoder.so"
COMPILERS = ("cc", "gcc", "clang")
# No instructions of other processors, no fused or reordered sums: the same pixels on every machine of one kind. They
# come after CFLAGS, which may add to them.
# Without alignment, a change elsewhere can slow the loops of the decoder of Huffman codes.
FLAGS = (
    *("-std=c11", "-O3", "-fno-fast-math", "-ffp-contract=off", "-falign-functions=64", "-falign-loops=32"),
    *(
        "-fPIC",
        "-shared",
        "-fvisibility=hidden",
        "-fstack-protector-strong",
        "-U_FORTIFY_SOURCE",
        "-D_FORTIFY_SOURCE=2",
    ),
    *("-Wl,-z,relro", "-Wl,-z,now", "-Wl,-z,noexecstack"),
)
STATIC_FLAGS = ("-DSTATIC_LIBJPEG", "-Wl,--exclude-libs,ALL")
OLDEST_STATIC = 3_001_000  # LIBJPEG_TURBO_VERSION_NUMBER: an older static library would miss the system's updates
DEBIAN = "(Debian: apt-get install gcc libjpeg62-turbo-dev)"


class CropDecoderHook(BuildHookInterface):
    """hatchling's custom build hook."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Builds into the source tree, from which an editable install runs, and adds the library to a wheel."""
        if self.target_name != "wheel":  # an editable install is one; an sdist has the sources
            return
        reason = build(Path(self.root) / FOLDER)
        if reason:
            self.app.display_warning(_warning(Path(self.root) / FOLDER, reason))
        if not (Path(self.root) / FOLDER / LIBRARY).exists():
            return
        self.app.display_info(f"with the crop decoder: {FOLDER}/{LIBRARY}")
        if version != "editable":
            build_data["artifacts"].append(f"{FOLDER}/{LIBRARY}")
            build_data["pure_python"] = False
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["tag"] = f"py3-none-{platform}"


def build(folder: Path) -> str:
    """Builds folder/libcrop_decoder.so from the sources there. Returns an empty string, or why it could not be built:
    then the former library stays if it is of the same sources; otherwise there is none."""
    try:
        reason = _build(folder)
    except (OSError, ValueError) as error:  # a read-only folder, a full disk, a CC with an unclosed quote
        reason = f"{error}"
    if reason:
        with suppress(OSError):
            if sources_digest(folder).encode() not in (folder / LIBRARY).read_bytes():
                (folder / LIBRARY).unlink()  # it is from other sources, and would be refused when it is loaded
    return " ".join(reason.split())


def _warning(folder: Path, reason: str) -> str:
    if (folder / LIBRARY).exists():
        return f"the crop decoder stays as it is, made of the same sources; it could not be built again: {reason}"
    return f"without the optional crop decoder, so JPEGs take longer: {reason}"


def sources_in(folder: Path) -> list[Path]:
    """The library's sources: all C files of the folder. pipeline/data/crop_decoder.py has the same rule."""
    return sorted(folder.glob("*.[ch]"))


def sources_digest(folder: Path) -> str:
    """The SHA-256 of the sources, one after the other, which the library holds as text."""
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources_in(folder))).hexdigest()


def _build(folder: Path) -> str:
    given = shlex.split(os.environ.get("CC", ""))
    compilers = [given] if given else [[name] for name in COMPILERS if shutil.which(name)]
    if not compilers:
        return f"no C compiler ({', '.join(COMPILERS)}) is on the PATH {DEBIAN}"
    reasons = []
    with tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as scratch:
        made = Path(scratch) / LIBRARY
        for compiler in compilers:
            may_be_static = _headers_version(compiler) >= OLDEST_STATIC
            for is_static in (True, False) if may_be_static else (False,):
                done = _run(_command(compiler, folder, made, is_static=is_static))
                if done.returncode == 0:
                    made.replace(folder / LIBRARY)  # replaced atomically: a run may have the old one open
                    return ""
            reasons.append(_reason(shlex.join(compiler), done.stderr))
    return reasons[0]


def _run(command: list[str], given: str = "") -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command,
        capture_output=True,
        input=given,
        text=True,
        errors="replace",
        check=False,
        env={**os.environ, "LC_ALL": "C"},  # _reason parses its messages
    )


def _headers_version(compiler: list[str]) -> int:
    """LIBJPEG_TURBO_VERSION_NUMBER of the headers that the compiler finds; 0 if it finds none."""
    lines = "#include <stdio.h>\n#include <jpeglib.h>\nLIBJPEG_TURBO_VERSION_NUMBER\n"
    done = _run([*compiler, *_given("CPPFLAGS", "CFLAGS"), "-E", "-x", "c", "-"], lines)
    last = (done.stdout.split() or [""])[-1]
    return int(last) if done.returncode == 0 and last.isdecimal() else 0


def _given(*names: str) -> list[str]:
    """The flags in these variables of the environment."""
    return [flag for name in names for flag in shlex.split(os.environ.get(name, ""))]


def _command(compiler: list[str], folder: Path, made: Path, *, is_static: bool) -> list[str]:
    sources = [str(source) for source in sources_in(folder) if source.suffix == ".c"]
    stamp = f'-DCROP_DECODER_SOURCES="{sources_digest(folder)}"'
    flags, libjpeg = (STATIC_FLAGS, "-l:libjpeg.a") if is_static else ((), "-ljpeg")
    before, after = _given("CPPFLAGS", "CFLAGS"), _given("LDFLAGS")
    return [*compiler, *before, *FLAGS, *flags, stamp, *sources, "-o", str(made), *after, libjpeg, "-lm"]


def _reason(compiler: str, said: str) -> str:
    telling = ("error", "cannot find", "failed")
    lines = [line for line in said.splitlines() if any(word in line for word in telling)] or said.splitlines()
    first = lines[0] if lines else "it failed and said nothing"
    if "jpeglib.h" in first and ("No such file" in first or "not found" in first):
        return f"{compiler} finds no jpeglib.h, the header of libjpeg-turbo {DEBIAN}"
    if "-ljpeg" in first or "library 'jpeg'" in first:
        return f"{compiler} finds no libjpeg to link with {DEBIAN}"
    return f"{compiler}: {first}"


if __name__ == "__main__":
    here = Path(__file__).resolve().parent / FOLDER
    why = build(here)
    if why and (here / LIBRARY).exists():
        sys.stderr.write(f"{_warning(here, why)}\n")
        why = ""
    sys.exit(f"the crop decoder was not built: {why}" if why else 0)
