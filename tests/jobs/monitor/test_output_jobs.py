"""Jobs of stages without a run directory are known by what they write, with Slurm's programs as scripts."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jobs.monitor.status import output_lines, outputs_in
from jobs.resolve import default_job
from jobs.submittable import output_name, run_name, work_name
from tests.jobs.cluster.test_slurm import programs
from tests.jobs.monitor.test_status import WAITING
from tests.rigs.processes import patchline


def name_of(stage: str, recipe: str, **fields: Any) -> str:
    return work_name([stage, recipe], replace(default_job(stage, recipe), **fields))


def test_one_output_has_one_job_however_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "pk"
    (tmp_path / "link").symlink_to(tmp_path)
    expected = name_of("pack", "digits", out=str(out))
    assert expected == output_name(str(out)) != run_name(str(out))
    assert name_of("pack", "digits", out=f"{tmp_path}/link/pk/") == expected
    monkeypatch.chdir(tmp_path)
    assert name_of("pack", "folder", seed=7, out="pk") == expected
    assert name_of("pack", "digits", out="s3://b/pk/") == name_of("pack", "digits", out="s3://b/pk") != expected


def test_parts_of_one_packing_are_different_jobs() -> None:
    parts = [{}, {"phase": "merge"}, *({"phase": "shards", "part": f"{number}/2"} for number in (0, 1))]
    assert len({name_of("pack", "digits", out="pk", **part) for part in parts}) == len(parts)


def test_other_stages_are_told_apart_by_their_fields(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [name_of("evaluate", weights) for weights in ("a", "b", "a")]
    assert names[0] == names[2] != names[1]
    monkeypatch.chdir(tmp_path)
    assert name_of("evaluate", "a") != names[0], "its paths may be relative"
    assert name_of("evaluate", "a", run_dir="run") == run_name(f"{tmp_path}/run")


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """Job 7 waits, and is to write pk."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "7").write_text(f"{WAITING} StdErr=/x/pack-digits-7.out\n")
    return programs(
        folder,
        squeue=f"echo '7 PENDING {output_name(str(tmp_path / 'pk'))}'",
        scontrol=f'cat "{folder}/$4" || exit 1',
        sbatch="echo 8",
    )


def test_status_of_what_a_job_is_to_write(tmp_path: Path, slurm: dict[str, str]) -> None:
    """The folder need not be there yet."""
    pk = str(tmp_path / "pk")
    ended = patchline("status", pk, environ=slurm)
    assert (ended.code, ended.output.splitlines()) == (
        0,
        [
            pk,
            "  job 7, a: is held: a node could not start it, so Slurm requeued it",
            "  > scontrol release 7; `sinfo -R` may name a drained node",
            "  its log: /x/pack-digits-7.out",
        ],
    ), ended.errors
    as_json = json.loads(patchline("status", pk, "--json", environ=slurm).output)
    assert (as_json["output"], as_json["jobs"][0]["job"]) == (pk, "7")
    other = patchline("status", str(tmp_path), environ=slurm)
    assert (other.code, "is neither a run nor a chain" in other.errors) == (2, True), other.errors


def test_it_is_not_submitted_twice(tmp_path: Path, slurm: dict[str, str]) -> None:
    (tmp_path / "cluster.yaml").write_text("command: [patchline]\n")
    words = ("pack", "digits", "--out", f"{tmp_path}/pk/", f"--cluster={tmp_path}/cluster.yaml", "--dry-run")
    ended = patchline("submit", *words, environ=slurm)
    assert (ended.code, "has a job already: 7 PENDING" in ended.errors) == (0, True), ended.errors


def test_without_an_answer_nothing_is_known(tmp_path: Path) -> None:
    environ = programs(tmp_path, squeue="exit 1")
    assert outputs_in([str(tmp_path / "pk")], environ) == {}
    assert output_lines({}) == []
