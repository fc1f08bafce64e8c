"""The optional library is built where it can be; where it can not, the install goes on and says why in one line."""

import importlib.util
import shutil
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from pipeline.data.crop_decoder import LIBRARY_NAME, CropDecoder

CHECKOUT = Path(__file__).resolve().parent.parent


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Any:
    """hatch_build.py with a stand-in for hatchling, which only pip's own build environment has."""
    interface = ModuleType("interface")
    interface.BuildHookInterface = object  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "hatchling.builders.hooks.plugin.interface", interface)
    for name in ("hatchling", "hatchling.builders", "hatchling.builders.hooks", "hatchling.builders.hooks.plugin"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    spec = importlib.util.spec_from_file_location("hatch_build", CHECKOUT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "pipeline" / "data"
    folder.mkdir(parents=True)
    for path in (CHECKOUT / "pipeline" / "data").glob("*.[ch]"):
        shutil.copy(path, folder)
    return tmp_path


def run(hook: Any, root: Path, version: str) -> tuple[dict[str, Any], list[str]]:
    said: list[str] = []
    build_data: dict[str, Any] = {"artifacts": []}
    builder = hook.CropDecoderHook()
    builder.root, builder.app = str(root), SimpleNamespace(display_warning=said.append, display_info=said.append)
    builder.initialize(version, build_data)
    return build_data, said


def test_a_wheel_holds_the_library_and_an_editable_install_finds_it(hook: Any, root: Path) -> None:
    if hook.build(root / hook.FOLDER):
        pytest.skip("no C compiler or no libjpeg-turbo headers here")
    wheel, said = run(hook, root, "standard")
    assert len(said) == 1
    assert wheel["artifacts"] == [f"pipeline/data/{LIBRARY_NAME}"]
    assert wheel["tag"].startswith("py3-none-linux")
    assert CropDecoder(root / "pipeline" / "data" / LIBRARY_NAME).name.startswith("libjpeg-turbo")
    editable, _ = run(hook, root, "editable")
    assert editable == {"artifacts": []}


def test_without_a_compiler_the_install_goes_on(hook: Any, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / hook.FOLDER / LIBRARY_NAME).write_bytes(b"of an older version")
    monkeypatch.setattr(hook.shutil, "which", lambda _: None)
    build_data, said = run(hook, root, "standard")
    assert build_data == {"artifacts": []}
    assert said == [
        "without the optional crop decoder, so JPEGs take longer: no C compiler (cc, gcc, clang) is on the PATH"
    ]
    assert not (root / hook.FOLDER / LIBRARY_NAME).exists(), "a stale one would stay"


def test_without_the_headers_the_install_goes_on(hook: Any, root: Path) -> None:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler here")
    source = root / hook.FOLDER / "crop_decoder.c"
    source.write_text(source.read_text().replace("<jpeglib.h>", "<jpeglib_that_is_not_here.h>"))
    build_data, said = run(hook, root, "standard")
    assert build_data == {"artifacts": []}
    assert len(said) == 1
    assert "jpeglib_that_is_not_here.h" in said[0]
    assert [path.name for path in (root / hook.FOLDER).iterdir() if path.suffix not in (".c", ".h")] == []
