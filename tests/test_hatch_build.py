"""The optional library is built if possible. If not, the installation continues and gives the reason in one line."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from pipeline.data.crop_decoder import LIBRARY_NAME, CropDecoder

CHECKOUT = Path(__file__).resolve().parent.parent
FLAGS = ("CC", "CFLAGS", "CPPFLAGS", "LDFLAGS")


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in FLAGS:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Any:
    """hatch_build.py with a stand-in for hatchling, which only pip's build environment has."""
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


@pytest.fixture
def built(hook: Any, root: Path) -> Path:
    """The library, built in `root`."""
    reason = hook.build(root / hook.FOLDER)
    if reason:
        pytest.skip(f"the crop decoder cannot be built here: {reason}")
    library: Path = root / hook.FOLDER / LIBRARY_NAME
    return library


def run(hook: Any, root: Path, version: str = "standard", target: str = "wheel") -> tuple[dict[str, Any], list[str]]:
    said: list[str] = []
    build_data: dict[str, Any] = {"artifacts": []}
    builder = hook.CropDecoderHook()
    builder.root, builder.app = str(root), SimpleNamespace(display_warning=said.append, display_info=said.append)
    builder.target_name = target
    builder.initialize(version, build_data)
    return build_data, said


def refused(hook: Any, root: Path) -> str:
    """Why the hook continued without the library: one line, and nothing of the build left behind."""
    build_data, said = run(hook, root)
    assert build_data == {"artifacts": []}
    assert len(said) == 1
    assert "\n" not in said[0]
    assert [path.name for path in (root / hook.FOLDER).iterdir() if path.suffix not in (".c", ".h")] == []
    start = "without the optional crop decoder, so JPEGs take longer: "
    assert said[0].startswith(start)
    return said[0].removeprefix(start)


def compiler_that(path: Path, action: str) -> Path:
    """A program that writes its arguments to a file beside itself, one per line, and then runs the action."""
    path.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >>"$0.args"\n{action}\n')
    path.chmod(0o755)
    return path


def test_a_wheel_holds_the_library_and_an_editable_install_finds_it(hook: Any, root: Path, built: Path) -> None:
    built.unlink()
    wheel, said = run(hook, root)
    assert len(said) == 1
    assert wheel["artifacts"] == [f"pipeline/data/{LIBRARY_NAME}"]
    assert wheel["tag"].startswith("py3-none-linux")
    assert CropDecoder(built).name.startswith("libjpeg-turbo")
    editable, _ = run(hook, root, "editable")
    assert editable == {"artifacts": []}


def test_an_sdist_has_the_sources_and_no_library(hook: Any, root: Path) -> None:
    assert run(hook, root, target="sdist") == ({"artifacts": []}, [])
    assert not (root / hook.FOLDER / LIBRARY_NAME).exists()


@pytest.mark.parametrize("name", sorted(path.name for path in (CHECKOUT / "pipeline" / "data").glob("*.[ch]")))
def test_the_library_of_other_sources_is_not_used(built: Path, name: str) -> None:
    assert CropDecoder(built).name
    with (built.parent / name).open("a") as source:
        source.write("/* newer */\n")
    with pytest.raises(ValueError, match=r"is made of other sources than the crop_decoder\.c, .* beside it"):
        CropDecoder(built)


def test_without_a_compiler_the_install_goes_on(hook: Any, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / hook.FOLDER / LIBRARY_NAME).write_bytes(b"of an older version")
    monkeypatch.setattr(hook.shutil, "which", lambda _: None)
    assert refused(hook, root).startswith("no C compiler (cc, gcc, clang) is on the PATH (Debian: apt-get install gcc ")


def test_a_build_that_fails_leaves_the_library_of_the_same_sources(
    hook: Any, root: Path, built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be missing for all who share the checkout."""
    before = built.read_bytes()
    monkeypatch.setattr(hook.shutil, "which", lambda _: None)
    assert hook.build(built.parent).startswith("no C compiler")
    assert built.read_bytes() == before
    wheel, said = run(hook, root)
    assert wheel["artifacts"] == [f"pipeline/data/{LIBRARY_NAME}"]
    assert said[0].startswith(
        "the crop decoder stays as it is, made of the same sources; it could not be built again: "
    )
    done = subprocess.run(
        [sys.executable, CHECKOUT / "hatch_build.py"],
        env={"PATH": "", "CC": "no-such-compiler"},
        capture_output=True,
        text=True,
        check=False,
    )
    has_one = (CHECKOUT / "pipeline" / "data" / LIBRARY_NAME).exists()
    assert done.returncode == (0 if has_one else 1), done.stderr
    with (built.parent / "crop_decoder.c").open("a") as source:
        source.write("/* newer */\n")
    assert hook.build(built.parent).startswith("no C compiler")
    assert not built.exists(), "it would be refused when it is loaded"


@pytest.mark.parametrize(
    ("version", "has_archive", "is_static"),
    [(3_001_003, True, True), (3_001_003, False, False), (2_001_005, True, False), (0, True, False)],
)
def test_a_new_libjpeg_turbo_is_linked_statically(
    hook: Any,
    root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    version: int,
    has_archive: bool,
    is_static: bool,
) -> None:
    linked = "" if has_archive else 'case "$*" in *libjpeg.a*) echo "cannot find -l:libjpeg.a" >&2; exit 1;; esac;'
    compiler = compiler_that(
        tmp_path / "cc",
        f'case "$*" in *"-E -x c"*) echo {version}; exit 0;; esac; {linked} echo "$@" >"{tmp_path}/last"; '
        'while [ "$1" != -o ]; do shift; done; echo made >"$2"',
    )
    monkeypatch.setenv("CC", str(compiler))
    assert hook.build(root / hook.FOLDER) == ""
    arguments = (tmp_path / "last").read_text().split()
    assert ("-l:libjpeg.a" in arguments, "-ljpeg" in arguments) == (is_static, not is_static)
    assert all((flag in arguments) == is_static for flag in hook.STATIC_FLAGS)


def test_only_what_python_calls_is_visible(built: Path) -> None:
    """Another libjpeg in the same process, such as Pillow's, must not meet this one's symbols."""
    said = subprocess.run(["nm", "--dynamic", "--defined-only", built], capture_output=True, text=True, check=True)
    names = {line.split()[-1] for line in said.stdout.splitlines()}
    assert names
    assert not {name for name in names if not name.startswith(("crop_decoder_", "sample_views_", "view_operations_"))}


def test_what_the_compiler_does_not_take_is_said(hook: Any, root: Path) -> None:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler here")
    source = root / hook.FOLDER / "crop_decoder.c"
    source.write_text(source.read_text().replace("<jpeglib.h>", "<jpeglib_that_is_not_here.h>"))
    reason = refused(hook, root)
    assert reason.startswith("cc: ")
    assert "jpeglib_that_is_not_here.h" in reason
    assert "apt-get" not in reason, "that would not help"


@pytest.mark.parametrize(
    ("says", "reason"),
    [
        ("a.c:12:10: fatal error: jpeglib.h: No such file or directory", "finds no jpeglib.h, the header of libjpeg-"),
        ("a.c:12:10: fatal error: 'jpeglib.h' file not found", "finds no jpeglib.h, the header of libjpeg-turbo (Deb"),
        ("/usr/bin/ld: cannot find -ljpeg: No such file or directory", "finds no libjpeg to link with (Debian: "),
        ("a warning\na.c:1:1: error: another\na.c:2:1: error: more", ": a.c:1:1: error: another"),
        (
            "ld: final link failed: No space left\ncollect2: error: ld returned 1",
            ": ld: final link failed: No space left",
        ),
        ("Segmentation fault", ": Segmentation fault"),
        ("", ": it failed and said nothing"),
    ],
)
def test_the_reason_is_the_compilers(
    hook: Any, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str, reason: str
) -> None:
    (tmp_path / "words").write_text(says)
    compiler = compiler_that(tmp_path / "mycc", f"cat '{tmp_path}/words' >&2; exit 1")
    monkeypatch.setenv("CC", str(compiler))
    said = refused(hook, root).removeprefix(str(compiler)).lstrip()
    assert said.startswith(reason)


def test_a_compiler_that_fails_is_followed_by_the_next(
    hook: Any, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    compiler_that(tools / "cc", "echo 'error: broken' >&2; exit 1")
    compiler_that(tools / "clang", 'while [ "$1" != -o ]; do shift; done; echo made >"$2"')
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    monkeypatch.setattr(hook, "COMPILERS", ("cc", "no-gcc-here", "clang"))
    assert hook.build(root / hook.FOLDER) == ""
    assert (root / hook.FOLDER / LIBRARY_NAME).read_text() == "made\n"
    compiler_that(tools / "clang", "echo 'error: as well' >&2; exit 1")
    assert hook.build(root / hook.FOLDER) == "cc: error: broken"
    monkeypatch.setenv("CC", "clang")
    assert hook.build(root / hook.FOLDER) == "clang: error: as well", "no other than the one asked for"


def test_the_usual_variables_are_heard(hook: Any, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = compiler_that(tmp_path / "my cc", "exit 1")
    for name, value in zip(
        FLAGS, (f"'{compiler}' -m64", "-O1 -g", "'-I/my jpeg' -DX", "-L/my -Wl,-z,now"), strict=True
    ):
        monkeypatch.setenv(name, value)
    assert hook.build(root / hook.FOLDER)
    asked = (tmp_path / "my cc.args").read_text().splitlines()
    headers, arguments = asked[: asked.index("-")], asked[asked.index("-") + 1 :]
    assert headers == ["-m64", "-I/my jpeg", "-DX", "-O1", "-g", "-E", "-x", "c"]
    assert arguments[:5] == ["-m64", "-I/my jpeg", "-DX", "-O1", "-g"]
    assert arguments[5 : 5 + len(hook.FLAGS)] == list(hook.FLAGS), "the last word on the pixels"
    assert arguments[-4:] == ["-L/my", "-Wl,-z,now", "-ljpeg", "-lm"]


@pytest.mark.parametrize(
    ("value", "reason"), [("no-such-compiler-here", "no-such-compiler-here"), ("'cc", "No closing quotation")]
)
def test_a_wrong_compiler_does_not_end_the_install(
    hook: Any, root: Path, monkeypatch: pytest.MonkeyPatch, value: str, reason: str
) -> None:
    monkeypatch.setenv("CC", value)
    assert reason in refused(hook, root)


@pytest.mark.parametrize("where", ["tempfile.TemporaryDirectory", "subprocess.run", "Path.replace", "Path.read_bytes"])
def test_trouble_with_the_disk_does_not_end_the_install(
    hook: Any, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Read-only sources or a full disk. root can write anyway, so the errors are simulated."""

    def fails(*_: object, **named: object) -> None:
        raise OSError(30, "Read-only file system", "/sources")

    compiler = compiler_that(tmp_path / "cc", 'while [ "$1" != -o ]; do shift; done; echo made >"$2"')
    monkeypatch.setenv("CC", str(compiler))
    holder, name = where.split(".")
    monkeypatch.setattr(getattr(hook, holder), name, fails)
    monkeypatch.setattr(hook.Path, "unlink", fails)
    assert refused(hook, root) == "[Errno 30] Read-only file system: '/sources'"


def make_setup(root: Path, **settings: str) -> str:
    """Runs `make setup` in a checkout that has everything except, perhaps, the library."""
    for name in ("pyproject.toml", "constraints.txt", "hatch_build.py", "Makefile"):
        shutil.copy(CHECKOUT / name, root)
    shutil.copytree(CHECKOUT / ".githooks", root / ".githooks", dirs_exist_ok=True)
    (root / "pipeline" / "data" / "transform.py").write_text(
        "from pathlib import Path\n\n\ndef decoder_name() -> str:\n"
        f"    found = (Path(__file__).parent / {LIBRARY_NAME!r}).exists()\n"
        "    return 'crop decoder (libjpeg-turbo)' if found else 'simplejpeg'\n"
    )
    for package in ("pipeline", "pipeline/data"):
        (root / package / "__init__.py").touch()
    (root / ".venv" / "bin").mkdir(parents=True, exist_ok=True)
    python = root / ".venv" / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    for stamp in (".torch", ".demo", ".all"):
        (root / ".venv" / stamp).touch()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        ["make", "--no-print-directory", "setup"],
        cwd=root,
        env={**environment, **settings},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.skipif(not (CHECKOUT / "Makefile").exists(), reason="an sdist has no Makefile")
def test_make_setup_builds_what_is_missing_and_says_what_decodes(hook: Any, root: Path, built: Path) -> None:
    found = built.stat().st_mtime_ns
    assert make_setup(root) == ".venv is ready; JPEGs are decoded by: crop decoder (libjpeg-turbo)\n"
    assert built.stat().st_mtime_ns == found, "there is nothing to do"
    built.unlink()
    without = make_setup(root, CC="no-such-compiler-here")
    assert "the crop decoder was not built: " in without
    assert ".venv is ready; JPEGs are decoded by: simplejpeg\n" in without
    assert "libjpeg62-turbo-dev" in without
    assert make_setup(root) == ".venv is ready; JPEGs are decoded by: crop decoder (libjpeg-turbo)\n"
    assert CropDecoder(built).name
