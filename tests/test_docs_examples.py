"""Every example in the documentation runs unchanged, in a file beside the dataset and the run that it uses."""

import ast
import importlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from jobs.data import pack
from shards.sources.digits import DigitsSource
from tests.rigs.faults import every_fault
from tests.rigs.processes import program
from tests.rigs.training import FinishedRuns

CHECKOUT = Path(__file__).resolve().parent.parent
ROOMS = ("shards", "pipeline", "jobs", "patchline")
DEADLINE_SECONDS = 120.0
# timm imports torchvision, whose build may not fit torch's.
PRELUDE = "from benchmarks.torchvision_operators import import_torchvision\nimport_torchvision()\n"
NO_NETWORK = {"HF_HUB_OFFLINE": "1"}


@dataclass(frozen=True, kw_only=True)
class Example:
    """A code block of a page: its language and its text."""

    language: str
    text: str


def examples(document: str, *languages: str, section: str = "") -> list[Example]:
    """The page's blocks in these languages, in order; of one section, if it is named."""
    text = (CHECKOUT / "docs" / document).read_text()
    if section:
        text = re.split(r"^## ", text.partition(f"\n## {section}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]
    blocks = re.findall(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    found = [Example(language=language, text=text) for language, text in blocks if language in languages]
    found = [example for example in found if not example.text.startswith("# needs ")]
    missing = set(languages) - {example.language for example in found}
    assert not missing, f"docs/{document} has no block of {', '.join(missing)}"
    return found


def run(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs a program in the folder; `patchline` is that of these tests."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environ = {**os.environ, **NO_NETWORK, "PYTHONPATH": str(CHECKOUT), "PATH": path}
    return subprocess.run(
        words, cwd=folder, env=environ, capture_output=True, text=True, check=False, timeout=DEADLINE_SECONDS
    )


@pytest.mark.long
def test_examples_of_streaming(digits_url: str, tmp_path: Path) -> None:
    """Runs one after the other in a folder with the dataset `digits`. They print nothing and leave no list of replaced
    samples."""
    (tmp_path / "digits").symlink_to(digits_url)
    for number, example in enumerate(examples("streaming.md", "python")):
        program = tmp_path / f"example_{number}.py"
        program.write_text(example.text)
        done = run([sys.executable, program.name], tmp_path)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), example.text
    assert not (tmp_path / "quarantine.jsonl").exists()


@every_fault
def test_what_an_example_imports_exists() -> Iterator[str]:
    """Of every page, those included whose examples take too long to run in the gate."""
    for page in sorted((CHECKOUT / "docs").rglob("*.md")):
        for text in re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
            for node in ast.walk(ast.parse(text)):
                if not isinstance(node, ast.ImportFrom) or str(node.module).partition(".")[0] not in ROOMS:
                    continue
                module = importlib.import_module(str(node.module))
                for alias in node.names:
                    if not hasattr(module, alias.name):
                        yield f"{page.relative_to(CHECKOUT)}: {node.module} has no {alias.name}"


@every_fault
def test_examples_import_us_only_from_patchline() -> Iterator[str]:
    """Our other packages are no interface: their names and places may change."""
    for page in (CHECKOUT / "README.md", *sorted((CHECKOUT / "docs").rglob("*.md"))):
        blocks = re.findall(r"^```(\w+)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
        for language, text in blocks:
            modules = imported(text) if language == "python" else re.findall(r"(?:import|from) ([\w.]+)", text)
            for module in modules:
                if module.partition(".")[0] in {*ROOMS} - {"patchline"}:
                    yield f"{page.relative_to(CHECKOUT)} imports {module}; export what it needs in patchline"


def imported(text: str) -> list[str]:
    """The modules that a program imports."""
    nodes = list(ast.walk(ast.parse(text)))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    return names + [str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)]


PAGE = (CHECKOUT / "docs" / "python.md").read_text()
PYTHON = examples("python.md", "python")
HEAVY = ("timm", "torchvision", "kornia", "albumentations", "num_workers=2)")  # they take seconds to begin


@pytest.fixture(scope="module")
def first_run(finished_runs: FinishedRuns, digits_url: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what README's first run leaves: `data/digits`, `data/digits-test` and `runs/digits`."""
    folder = tmp_path_factory.mktemp("first-run")
    (folder / "data").mkdir()
    (folder / "runs").mkdir()
    (folder / "data" / "digits").symlink_to(digits_url)
    out = str(folder / "data" / "digits-test")
    assert pack.run(pack.PackJob(out=out, source=DigitsSource(split="test"), split="test")) == 0
    (folder / "runs" / "digits").symlink_to(finished_runs.get(1))
    return folder


@pytest.mark.parametrize(
    "example",
    [pytest.param(one, marks=[pytest.mark.long] * any(name in one.text for name in HEAVY)) for one in PYTHON],
    ids=[PAGE[: PAGE.index(one.text)].rpartition("\n## ")[2].partition("\n")[0] for one in PYTHON],
)
def test_examples_of_python(example: Example, first_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each in an empty folder with the data and the run, and in a process of its own, forked from one that has torch.
    None leaves a list of replaced samples."""
    for name in {module.partition(".")[0] for module in imported(example.text)}:
        if find_spec(name) is None:
            pytest.skip(f"{name} is not installed (make setup installs what the extra `test` names)")
    for name in ("data", "runs"):
        (tmp_path / name).symlink_to(first_run / name)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)  # of a run that another test made in this process
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    prelude = f"import os, sys\nos.chdir({str(tmp_path)!r})\n"
    if "import timm" in example.text:
        (command,) = examples("python.md", "bash")
        done = run(["bash", "-e", "-c", command.text], tmp_path)
        assert done.returncode == 0, done.stderr
    if any(name in example.text for name in HEAVY):
        prelude += PRELUDE
    if "num_workers=2)" in example.text:  # workers are forked only from a program that was not
        (tmp_path / "example.py").write_text(example.text)
        done = run([sys.executable, "example.py"], tmp_path)
        assert done.returncode == 0, done.stderr
        return
    ended = program(prelude + example.text)
    assert (ended.code, "Traceback" in ended.errors) == (0, False), ended.errors
    assert not (tmp_path / "quarantine.jsonl").exists()


@pytest.mark.long
def test_examples_of_models(finished_runs: FinishedRuns, tmp_path: Path) -> None:
    """Runs shell commands and Python in order, beside a finished run called `runs/digits`. They print nothing."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "digits").symlink_to(finished_runs.get(1))
    for number, example in enumerate(examples("models.md", "bash", "python")):
        program = tmp_path / f"example_{number}"
        program.write_text(example.text if example.language == "bash" else PRELUDE + example.text)
        interpreter = ["bash", "-e"] if example.language == "bash" else [sys.executable]
        done = run([*interpreter, program.name], tmp_path)
        assert (done.returncode, done.stdout) == (0, ""), f"{example.text}\n{done.stderr}"


def test_examples_of_watching(finished_runs: FinishedRuns, tmp_path: Path) -> None:
    """The report's commands, beside a copy of a finished run called `runs/digits`. Each prints what its page begins
    with."""
    shutil.copytree(finished_runs.get(1), tmp_path / "runs" / "digits")
    (example,) = examples("watching.md", "bash", section="The report of a run")
    done = run(["bash", "-e", "-c", example.text], tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("digits: pretrain of digits_smoke +") == 2
    assert (tmp_path / "runs" / "digits" / "report.html").read_text().startswith("<!doctype html>")
    assert (tmp_path / "digits.html").exists()


@pytest.mark.parametrize("page", sorted((CHECKOUT / "docs").rglob("*.md")), ids=lambda page: page.name)
def test_no_number_is_still_to_do(page: Path) -> None:
    assert "TODO" not in page.read_text(), f"{page.name} has a place that waits for a number"
