"""Builds the crop decoder of pipeline/data where a C compiler and libjpeg-turbo's headers are; else goes on without.

Run by pip for a wheel and for an editable install. The library is optional: without it, the same pixels come slower.
"""

import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = "pipeline/data"
SOURCES = ("crop_decoder.c", "view_resize.c")
LIBRARY = "libcrop_decoder.so"
# No other processor's instructions, no fused products: the same pixels on any machine of the kind.
FLAGS = ("-std=c11", "-O3", "-ffp-contract=off", "-fPIC", "-shared")


class CropDecoderHook(BuildHookInterface):
    """hatchling's custom build hook."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Builds into the source tree, where an editable install runs, and adds the library to a wheel."""
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
    """Makes folder/libcrop_decoder.so of the sources there. Empty, or why it could not be made (then there is none)."""
    target = folder / LIBRARY
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    reason = "no C compiler (cc, gcc, clang) is on the PATH"
    if compiler is not None:
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / LIBRARY
            sources = [str(folder / name) for name in SOURCES]
            command = [compiler, *FLAGS, *sources, "-o", str(made), "-ljpeg", "-lm"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                made.replace(target)  # whole or not at all: a run may have the old one open
                return ""
        reasons = [line for line in done.stderr.splitlines() if "error" in line or "cannot find" in line]
        reason = f"{compiler}: {(reasons or ['failed'])[0]} (Debian: apt-get install libjpeg62-turbo-dev)"
    target.unlink(missing_ok=True)
    return reason
