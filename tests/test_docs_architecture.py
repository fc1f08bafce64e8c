"""docs/architecture.md names files and functions that exist and every folder of the code; its picture is up to date."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from docs import architecture_figure as figure
from tests.rigs.faults import every_fault

CHECKOUT = Path(__file__).resolve().parent.parent
PAGE = (CHECKOUT / "docs" / "architecture.md").read_text()
ROOMS = ("shards", "pipeline", "jobs", "patchline")
NAMED = sorted(set(re.findall(r"`([a-z0-9_/]+\.(?:py|md|sbatch))(?::([\w.]+))?`", PAGE)))


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


def test_every_folder_of_the_code_has_its_line() -> None:
    folders = {path.parent.relative_to(CHECKOUT) for room in ROOMS for path in (CHECKOUT / room).rglob("__init__.py")}
    assert [str(folder) for folder in sorted(folders) if f"| `{folder}/` |" not in PAGE] == []


def test_the_picture_shows_every_folder_and_files_that_exist() -> None:
    shown = {box.name.rstrip("/") for box in (*figure.ROOMS, *figure.FOLDERS)}
    folders = {path.parent.name for room in ROOMS for path in (CHECKOUT / room).rglob("__init__.py")}
    assert folders - shown == {"patchline"}, "the front door is not a room"
    files = [file for route in figure.ROUTES for file, _ in (*route.stops, *route.back_stops)]
    assert [file for file in (*files, figure.LOOP) if not (CHECKOUT / file).is_file()] == []


@pytest.mark.parametrize("route", figure.ROUTES, ids=lambda route: route.title)
def test_the_picture_has_the_files_of_the_page_in_their_order(route: figure.Route) -> None:
    section = PAGE.split(f"## Path {route.letter}: ")[1].split("\n## ")[0]
    files = iter(re.findall(r"`([a-z0-9_/]+\.py):[\w.]+`", section))
    shown = [file for file, _ in (*route.stops, *route.back_stops)]
    assert [file for file in shown if file not in files] == [], "not on this path, or not in this order"


def test_the_picture_is_up_to_date() -> None:
    drawn = (CHECKOUT / "docs" / "architecture.svg").read_text()
    assert drawn == figure.draw(), "draw it again: python -m docs.architecture_figure"
