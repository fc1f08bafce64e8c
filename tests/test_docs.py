"""Pages of the documentation agree with the code.

docs/architecture.md names files and functions that exist and every folder of the code, and its picture is up to date;
docs/reference/models.md has the tables that the functions print, and names tests that exist; docs/benchmarks.md has the
parity of every model; docs/reference/messages.md quotes messages exactly as they are in the code;
docs/reference/tried.md has every result that is kept, its machine and its command.
"""

import ast
import json
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from docs import architecture_figure as figure
from docs import cluster_table, recipes_page
from docs.models_tables import TABLE_6, costs, sizes
from tests.pipeline.models.parity import BOUND, HEADER, ROWS, words_of
from tests.pipeline.models.test_flops import TABLE_6 as TESTED
from tests.rigs.faults import every_fault

CHECKOUT = Path(__file__).resolve().parent.parent
ARCHITECTURE = (CHECKOUT / "docs" / "architecture.md").read_text()
ROOMS = ("shards", "pipeline", "jobs", "patchline")
NAMED = sorted(set(re.findall(r"`([a-z0-9_/]+\.(?:py|md|sbatch))(?::([\w.]+))?`", ARCHITECTURE)))
MODELS = (CHECKOUT / "docs" / "reference" / "models.md").read_text()
BENCHMARKS = (CHECKOUT / "docs" / "benchmarks.md").read_text()
TRIED = (CHECKOUT / "docs" / "reference" / "tried.md").read_text()
MESSAGES = (CHECKOUT / "docs" / "reference" / "messages.md").read_text()
OTHERS = {"CUDA out of memory", "Address already in use"}  # messages of PyTorch and of the system
QUOTED = [" ".join(text.split()) for text in re.findall(r"^\*\*`(.*?)`\*\*", MESSAGES, re.MULTILINE | re.DOTALL)]
_FIELD = re.compile(r"%[sdr]|%\.\d+f")


def names_in(path: Path) -> set[str]:
    """Functions and classes of a file, methods as CLASS.METHOD."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{own.name}" for own in node.body if isinstance(own, ast.FunctionDef)}
    return names


@every_fault
def test_every_file_and_function_that_is_named_exists() -> Iterator[str]:
    for file, name in NAMED:
        if "/" not in file:
            continue
        if not (CHECKOUT / file).is_file():
            yield f"docs/architecture.md names {file}, which does not exist"
        elif name and name not in names_in(CHECKOUT / file):
            yield f"docs/architecture.md names {file}:{name}, but the file has no {name}"


def sections(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


@every_fault
def test_every_link_of_a_page_leads_somewhere() -> Iterator[str]:
    for page in (*CHECKOUT.glob("*.md"), *(CHECKOUT / "docs").rglob("*.md"), CHECKOUT / "slurm" / "README.md"):
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            path, _, section = link.partition("#")
            if ":" in path:
                continue  # of another site
            target = (page.parent / path).resolve() if path else page
            if not target.exists():
                yield f"{page.relative_to(CHECKOUT)}: {link} does not exist"
            elif section and target.suffix == ".md" and section not in sections(target):
                yield f"{page.relative_to(CHECKOUT)}: {link}: the page has no such section"


def test_every_folder_of_the_code_has_its_line() -> None:
    folders = {path.parent.relative_to(CHECKOUT) for room in ROOMS for path in (CHECKOUT / room).rglob("__init__.py")}
    assert [str(folder) for folder in sorted(folders) if f"| `{folder}/` |" not in ARCHITECTURE] == []


def test_the_picture_shows_folders_and_files_that_exist() -> None:
    names = " ".join(box.name for box in (*figure.ROOMS, *figure.FOLDERS)).split()
    shown = {name.rstrip("/") for name in names if name.endswith("/")}
    folders = {path.parent.name for room in ROOMS for path in (CHECKOUT / room).rglob("__init__.py")}
    assert shown - folders == {"slurm"}, "which has no Python"
    files = [file for route in figure.ROUTES for file, _ in (*route.stops, *route.back_stops)]
    assert [file for file in (*files, figure.LOOP) if not (CHECKOUT / file).is_file()] == []


@pytest.mark.parametrize("route", figure.ROUTES, ids=lambda route: route.title)
def test_the_picture_has_the_files_of_the_page_in_their_order(route: figure.Route) -> None:
    section = ARCHITECTURE.split(f"## Path {route.letter}: ")[1].split("\n## ")[0]
    files = iter(re.findall(r"`([a-z0-9_/]+\.py):[\w.]+`", section))
    shown = [file for file, _ in (*route.stops, *route.back_stops)]
    assert [file for file in shown if file not in files] == [], "not on this path, or not in this order"


def test_the_picture_is_up_to_date() -> None:
    drawn = (CHECKOUT / "docs" / "architecture.svg").read_text()
    assert drawn == figure.draw(), "draw it again: python -m docs.pictures architecture"


def test_sizes_and_costs_are_those_that_are_counted() -> None:
    assert sizes() in MODELS, "print them again: python -m docs.models_tables"
    assert costs() in MODELS, "print them again: python -m docs.models_tables"


def test_the_table_of_clusters_settings_is_written_from_them() -> None:
    page = (CHECKOUT / "docs" / "reference" / "slurm.md").read_text()
    assert cluster_table.settings() in page, "print it again: python -m docs.cluster_table"


def test_the_page_of_recipes_is_written_from_them() -> None:
    assert recipes_page.PAGE.read_text() == recipes_page.page(), "write it again: python -m docs.recipes_page"


def test_every_row_of_the_papers_table_is_one_that_is_tested() -> None:
    assert [tuple(row.values[:3]) for row in TESTED] == list(TABLE_6)


def test_the_parity_table_has_every_row_and_none_beyond_the_bound() -> None:
    lines = BENCHMARKS[BENCHMARKS.index("| " + " | ".join(HEADER)) :].split("\n\n")[0].splitlines()[2:]
    cells = [tuple(line.strip("| ").split(" | ")) for line in lines]
    assert [row[:-1] for row in cells] == [words_of(row) for row in ROWS]
    assert all(0 < float(row[-1]) < BOUND for row in cells)


def test_every_test_that_is_named_is_there() -> None:
    named = re.findall(r"`((?:\w+/)*test_\w+\.py)::(test_\w+)`", MODELS)
    assert named
    for file, name in named:
        (path,) = (CHECKOUT / "tests" / "pipeline" / "models").rglob(file)
        assert f"def {name}(" in path.read_text(), f"{file} has no {name}"


@every_fault
def test_every_result_has_its_row_with_its_machine_and_its_command() -> Iterator[str]:
    rows = {}
    for path, cells in re.findall(r"^\| \[[\w.-]+\]\(\.\./\.\./(\S+)\) \| (.*) \|$", TRIED, re.MULTILINE):
        rows[path] = cells.split(" | ")
    for folder in ("benchmarks/results", "tests/soak/results", "tests/fuzz/results", "tests/long"):
        for file in (CHECKOUT / folder).glob("*.json"):
            path, result = str(file.relative_to(CHECKOUT)), json.loads(file.read_text())
            if path not in rows:
                yield f"docs/reference/tried.md has no row of {path}"
                continue
            _, machine, _, command = rows[path]
            names = {name.replace("(R)", "").removesuffix(" Processor") for name in _machines(result)}
            if any(name not in machine for name in names) or not (
                names or machine.startswith(("not recorded", "none: "))
            ):
                yield f"docs/reference/tried.md names another machine than {path}: {sorted(names) or 'not recorded'}"
            kept = result.get("command", "not recorded")
            if not any(words.strip("`") in kept for words in re.findall(r"`[^`]+`|not recorded", command)):
                yield f"docs/reference/tried.md names another command than {path}: {kept}"


def _machines(result: dict[str, Any]) -> Iterator[str]:
    """The names of the processors in a result and in its parts, and of the GPU that it is about."""
    for name in (result.get("cpu"), result.get("about", {}).get("name")):
        if isinstance(name, str) and name:
            yield name
    for value in result.values():
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, dict):
                yield from _machines(part)


@every_fault
def test_every_extra_that_is_named_exists() -> Iterator[str]:
    extras = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    pages = (*CHECKOUT.glob("*.md"), *(CHECKOUT / "docs").rglob("*.md"), CHECKOUT / "Makefile")
    code = (path for room in ROOMS for path in (CHECKOUT / room).rglob("*.py"))
    for page in (*pages, *code):
        for names in re.findall(r"(?:'\.|patchline)\[([a-z,]+)\]", page.read_text()):
            for name in set(names.split(",")) - extras.keys():
                yield f"{page.relative_to(CHECKOUT)} names the extra {name}, which pyproject.toml does not have"


def test_the_classifiers_name_the_versions_of_python_that_are_tested() -> None:
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    named = re.findall(r"Python :: (3\.\d+)$", "\n".join(project["classifiers"]), re.MULTILINE)
    assert named == re.findall(r"^\| (3\.\d+) \| Everything", (CHECKOUT / "CONTRIBUTING.md").read_text(), re.MULTILINE)


@cache
def said() -> str:
    """Every text in the code, one per line, with … in place of values."""
    texts = []
    for room in ("shards", "pipeline", "jobs"):
        for path in sorted((CHECKOUT / room).rglob("*.py")):
            texts += [_text(node) for node in ast.walk(ast.parse(path.read_text()))]
    return "\n".join(_FIELD.sub("…", text) for text in texts)


def _text(node: ast.AST) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


@every_fault
def test_every_message_is_said_somewhere() -> Iterator[str]:
    """Compares piece by piece: a piece between two values may come from another text in the code."""
    for message in QUOTED:
        for piece in (piece.strip(" ;:") for piece in message.split("…") if message not in OTHERS):
            if piece not in said():
                yield f"nothing says {piece!r}, of the message {message!r}"


def test_there_are_twenty_messages() -> None:
    assert len(QUOTED) >= 20


def test_the_recorded_session_is_of_this_version() -> None:
    """A release records it anew (CONTRIBUTING.md), so that it cannot go stale."""
    version = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]["version"]
    assert f"Recorded with version {version} by" in (CHECKOUT / "docs" / "session.md").read_text()
