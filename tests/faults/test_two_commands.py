"""Two commands on one dataset: whenever the second one comes, the bytes are those of one, or there is one message.

The second command runs from its start to its end inside an operation of the first one's store.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from jobs import exit_codes
from jobs.data.card import run as card
from jobs.data.pack import PackJob, Phase, run
from jobs.exit_codes import end_of
from jobs.settings.data import CardJob
from shards.dataset import open_dataset
from shards.errors import StorageError, UserError
from shards.manifest import MANIFEST_PATH
from shards.sources.kinds import FolderSource
from shards.store import open_store
from shards.verifying.verify import verify_dataset
from tests.rigs.datasets import file_hashes, object_hashes
from tests.rigs.images import class_folders
from tests.rigs.interleaved import Interleaving

PHASES: tuple[Phase, ...] = ("scan", "plan", "shards", "merge")


@pytest.fixture
def job(tmp_path: Path) -> PackJob:
    """Four images into two shards."""
    root = class_folders(tmp_path / "images", num_classes=2, images_a_class=2)
    return PackJob(source=FolderSource(root=str(root)), samples_per_shard=2, samples_per_block=1)


def in_phases(job: PackJob) -> int:
    """The four phases, as tasks of a cluster run them."""
    return max(run(replace(job, phase=phase)) for phase in PHASES)


@pytest.mark.parametrize(("first", "every"), [(run, 2), pytest.param(in_phases, 5, marks=pytest.mark.long)])
def test_packing_to_the_same_folder(
    job: PackJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: Callable[[PackJob], int], every: int
) -> None:
    run(replace(job, out=str(tmp_path / "alone")))
    expected, moments = file_hashes(tmp_path / "alone"), Interleaving(monkeypatch)
    at = 0
    while at <= moments.count or not at:
        at += every
        out = tmp_path / f"out-{at}"
        here = replace(job, out=str(out))
        said = ended(lambda here=here: first(here), lambda here=here: run(here), moments, at)  # type: ignore[misc]
        assert file_hashes(out) == expected, f"{at}: {moments.name}: {said}"
    assert at > 20


@pytest.mark.long
def test_packing_to_the_same_bucket(
    job: PackJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, s3_bucket: str
) -> None:
    run(replace(job, out=str(tmp_path / "alone")))
    expected, moments = file_hashes(tmp_path / "alone"), Interleaving(monkeypatch)
    at = 0
    while at <= moments.count or not at:
        at += 7
        here = replace(job, out=f"s3://{s3_bucket}/out-{at}")
        said = ended(lambda here=here: run(here), lambda here=here: run(here), moments, at)  # type: ignore[misc]
        assert object_hashes(open_store(here.out)) == expected, f"{at}: {moments.name}: {said}"


def ended(first: Callable[[], int], second: Callable[[], int], moments: Interleaving, at: int) -> str:
    """What the first command says if it does not end with 0. The second one always does."""
    codes: list[int] = []
    try:
        code = moments.run(first, other=lambda: codes.append(second()), at=at)
        said = ""
    except (UserError, StorageError) as error:
        code, said = end_of(error).code, str(error)
    assert codes in ([], [exit_codes.DONE])
    assert code in ((exit_codes.USER_MISTAKE, exit_codes.CRASH) if said else (exit_codes.DONE,))
    assert not said or "is gone: another command has packed" in said or "let only one command write there" in said
    return said


def test_reading_what_is_still_being_packed(job: PackJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """verify, card and training: there is no dataset, and one message says so, or it is whole."""
    here, moments = replace(job, out=str(tmp_path / "out")), Interleaving(monkeypatch)
    outcomes = set()

    def read() -> None:
        if not open_store(here.out).exists(MANIFEST_PATH):
            outcomes.add("none")
            with pytest.raises(
                UserError,
                match=r"there is nothing at|is not packed to its end|has no manifest",
            ):
                open_dataset(here.out)
            return
        dataset = open_dataset(here.out)
        outcomes.add("whole")
        assert dataset.num_samples == 4
        assert [fault for fault in verify_dataset(here.out) if not fault.where.startswith("work/")] == []
        assert card(CardJob(url=here.out)) == exit_codes.DONE

    at = 0
    while at <= moments.count or not at:
        at += 3
        for path in list(open_store(here.out).list()):
            open_store(here.out).delete(path)
        assert moments.run(lambda: run(here), other=read, at=at) == exit_codes.DONE
    assert outcomes == {"none", "whole"}
