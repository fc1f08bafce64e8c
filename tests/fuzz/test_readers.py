"""Every reader takes damaged and hostile files: it succeeds, and what it hands over is sound, or it says what is wrong.

The seed is always the same, so a failure is the fault of a change. `make fuzz` tries other cases for as long as wanted.
"""

from pathlib import Path

import pytest

from tests.fuzz.campaign import Tally, child_of, fuzz
from tests.fuzz.cases import KEPT, Case, case_from_json
from tests.fuzz.targets import TARGETS

SEED = 0
CASES = [case_from_json(path.read_text()) for path in sorted(KEPT.glob("*.json"))]


@pytest.mark.parametrize("name", TARGETS)
def test_unedited_files_are_read(name: str, root: Path, tmp_path: Path) -> None:
    """Otherwise it would say nothing that edited ones are refused."""
    with child_of(TARGETS[name], root, tmp_path / "child") as child:
        for way in TARGETS[name].ways:
            for is_sealed in {False, TARGETS[name].seal is not None}:
                found = child.outcome(Case(target=name, way=way, edits=(), is_sealed=is_sealed))
                assert found.kind == "success", f"{way}: {found.what}\n{found.detail}"


@pytest.mark.parametrize("name", TARGETS)
def test_edited_files_are_read_or_refused(name: str, root: Path, tmp_path: Path) -> None:
    target, tally = TARGETS[name], Tally()
    with child_of(target, root, tmp_path / "child") as child:
        fuzz(child, tally, seed=SEED, first=0, goes_on=lambda number: number < target.num_cases)
    found = [f"{found.case.to_json()}{found.outcome.detail}" for found in tally.findings.values()]
    assert not found, "\n\n".join([f"{name} fails in {len(found)} ways; keep each case as a file in {KEPT}", *found])


@pytest.mark.parametrize("name", sorted({case.target for case in CASES}))
def test_cases_that_failed_once_are_read_or_refused(name: str, root: Path, tmp_path: Path) -> None:
    with child_of(TARGETS[name], root, tmp_path / "child") as child:
        outcomes = [(case, child.outcome(case)) for case in CASES if case.target == name]
    failed = [f"{_shown(case)}: {found.what}\n{found.detail}" for case, found in outcomes if found.kind == "failed"]
    assert not failed, "\n\n".join(failed)


def _shown(case: Case) -> str:
    return f"{case.target} by {case.way}, sealed: {case.is_sealed}, {str(case.edits)[:300]}"
