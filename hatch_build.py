"""Builds the crop decoder of pipeline/data if there are a C compiler and libjpeg-turbo's headers; otherwise continues
without it.

pip runs this for wheels and editable installs. The library is optional: without it, decoding takes longer and gives the
same pixels. `python hatch_build.py` builds it in a checkout; CC, CFLAGS, CPPFLAGS and LDFLAGS work as usual.
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
SOURCES = (
    *("crop_decoder.c", "huffman_decoder.c", "huffman_decoder.h"),
    *("sample_views.c", "sample_views.h", "view_operations.c"),
    *("view_resize.c", "view_resize.h"),
)
LIBRARY = "libcrop_decoder.so"
COMPILERS = ("cc", "gcc", "clang")
# No instructions of other processors, no fused or reordered sums: the same pixels on every machine of one kind. They
# come after CFLAGS, which may add to them.
# Without alignment, a change elsewhere can slow the loops of the decoder of Huffman codes.
FLAGS = (
    *("-std=c11", "-O3", "-fno-fast-math", "-ffp-contract=off", "-falign-functions=64", "-falign-loops=32"),
    *("-fPIC", "-shared"),
)
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
            self.app.display_warning(f"without the optional crop decoder, so JPEGs take longer: {reason}")
            return
        self.app.display_info(f"with the crop decoder: {FOLDER}/{LIBRARY}")
        if version != "editable":
            build_data["artifacts"].append(f"{FOLDER}/{LIBRARY}")
            build_data["pure_python"] = False
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["tag"] = f"py3-none-{platform}"


def build(folder: Path) -> str:
    """Builds folder/libcrop_decoder.so from the sources there. Returns an empty string, or why it could not be built
    (then there is none)."""
    try:
        reason = _build(folder)
    except (OSError, ValueError) as error:  # a read-only folder, a full disk, a CC with an unclosed quote
        reason = f"{error}"
    if reason:
        with suppress(OSError):
            (folder / LIBRARY).unlink()  # it may be from older sources, which are refused when it is loaded
    return " ".join(reason.split())


def _build(folder: Path) -> str:
    given = shlex.split(os.environ.get("CC", ""))
    compilers = [given] if given else [[name] for name in COMPILERS if shutil.which(name)]
    if not compilers:
        return f"no C compiler ({', '.join(COMPILERS)}) is on the PATH {DEBIAN}"
    reasons = []
    with tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as scratch:
        made = Path(scratch) / LIBRARY
        for compiler in compilers:
            done = subprocess.run(
                _command(compiler, folder, made),
                capture_output=True,
                text=True,
                errors="replace",
                check=False,
                env={**os.environ, "LC_ALL": "C"},  # _reason parses its messages
            )
            if done.returncode == 0:
                made.replace(folder / LIBRARY)  # replaced atomically: a run may have the old one open
                return ""
            reasons.append(_reason(shlex.join(compiler), done.stderr))
    return reasons[0]


def _command(compiler: list[str], folder: Path, made: Path) -> list[str]:
    before, after = (
        [flag for name in names for flag in shlex.split(os.environ.get(name, ""))]
        for names in (("CPPFLAGS", "CFLAGS"), ("LDFLAGS",))
    )
    digest = hashlib.sha256(b"".join((folder / name).read_bytes() for name in SOURCES)).hexdigest()
    sources = [str(folder / name) for name in SOURCES if name.endswith(".c")]
    stamp = f'-DCROP_DECODER_SOURCES="{digest}"'
    return [*compiler, *before, *FLAGS, stamp, *sources, "-o", str(made), *after, "-ljpeg", "-lm"]


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
    why = build(Path(__file__).resolve().parent / FOLDER)
    sys.exit(f"the crop decoder was not built: {why}" if why else 0)
