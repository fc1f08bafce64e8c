"""Every reader takes damaged and hostile files: it succeeds, and what it hands over is sound, or it says what is wrong.

The seed is always the same, so a failure is the fault of a change. The gate tries every kept case and ten made ones for
each reader, the long part a campaign. `make fuzz` tries other cases for as long as wanted.
"""

from pathlib import Path

import pytest

from tests.fuzz.campaign import Child, Tally, child_of, fuzz
from tests.fuzz.cases import KEPT, Case, case_from_json
from tests.fuzz.targets import TARGETS, Target

SEED = 0
NUM_CASES = 10
CASES = [case_from_json(path.read_text()) for path in sorted(KEPT.glob("*.json"))]


@pytest.mark.parametrize("name", TARGETS)
def test_kept_files_and_ten_others_are_read_or_refused(name: str, root: Path, tmp_path: Path) -> None:
    target = TARGETS[name]
    with child_of(target, root, tmp_path / "child") as child:
        unread = [case for case in _unedited(target) if child.outcome(case).kind != "success"]
        assert not unread, "valid files are not read"  # it would say nothing that edited ones are refused
        outcomes = [(case, child.outcome(case)) for case in CASES if case.target == name]
        new = _tried(child, num_cases=NUM_CASES)
    old = [f"{_shown(case)}: {found.what}\n{found.detail}" for case, found in outcomes if found.kind == "failed"]
    assert not old, "\n\n".join([f"{name} fails again on cases in {KEPT}", *old])
    assert not new, "\n\n".join([f"{name} fails in {len(new)} ways; keep each case as a file in {KEPT}", *new])


@pytest.mark.long
@pytest.mark.parametrize("name", TARGETS)
def test_files_of_a_campaign_are_read_or_refused(name: str, root: Path, tmp_path: Path) -> None:
    with child_of(TARGETS[name], root, tmp_path / "child") as child:
        new = _tried(child, num_cases=TARGETS[name].num_cases)
    assert not new, "\n\n".join([f"{name} fails in {len(new)} ways; keep each case as a file in {KEPT}", *new])


def _tried(child: Child, *, num_cases: int) -> list[str]:
    """Tries made cases and describes each way in which the reader failed."""
    tally = Tally()
    fuzz(child, tally, seed=SEED, first=0, goes_on=lambda number: number < num_cases)
    return [f"{found.case.to_json()}{found.outcome.detail}" for found in tally.findings.values()]


def _unedited(target: Target) -> list[Case]:
    seals = {False, target.seal is not None}
    return [Case(target=target.name, way=way, edits=(), is_sealed=one) for way in target.ways for one in seals]


def _shown(case: Case) -> str:
    return f"{case.target} by {case.way}, sealed: {case.is_sealed}, {str(case.edits)[:300]}"
