"""`patchline status` of folders and of what jobs write, with Slurm's programs as scripts. tests/slurm/test_watching.py
has the real ones."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jobs.monitor.status import output_lines, outputs_in
from jobs.resolve import default_job
from jobs.submittable import output_name, run_name, work_name
from tests.jobs.cluster.test_slurm import RUNNING, SILENT, UNKNOWN, programs
from tests.jobs.reports.test_ls import make
from tests.rigs.processes import patchline

WAITING = (
    "JobId=7 JobName=a JobState=PENDING Reason=launch_failed_requeued_held Restarts=1 SubmitTime=1000 ExitCode=0:0 "
    "NodeList="
)
FAULT = {"job": 7, "start": 1, "try": 0, "exit_codes": [74, 75], "end": "crashed"}


def submitted(run_dir: Path, *jobs: int) -> Path:
    (run_dir / "submit").mkdir(exist_ok=True, parents=True)
    (run_dir / "submit" / "submitted.jsonl").write_text(
        "".join(json.dumps({"job": job, "submitted": 1000}) + "\n" for job in jobs)
    )
    return run_dir


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """Job 2 runs on two nodes, one of them drained; job 7 is held; the others are not known."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "2").write_text(RUNNING)
    (tmp_path / "bin" / "7").write_text(WAITING)
    return programs(
        tmp_path / "bin",
        scontrol=f'cat "{tmp_path}/bin/$4" 2>&- || {UNKNOWN}',
        sinfo="printf 'n1|allocated|none\\nn2|drained|bad disk\\n'",
    )


def test_every_job_has_a_line_and_what_mends_it(tmp_path: Path, slurm: dict[str, str]) -> None:
    run_dir = submitted(make(tmp_path / "one", step=100), 1, 2, 7)
    ended = patchline("status", str(run_dir), environ=slurm)
    assert (ended.code, ended.errors) == (0, "")
    _, row, *lines = [line.strip() for line in ended.output.splitlines()]
    assert row.split()[:4] == ["one", "digits_smoke", "stopped", "100/300"]
    assert lines[-5:] == [
        "job 7, start 2: is held: a node could not start it, so Slurm requeued it",
        "> scontrol release 7; `sinfo -R` may name a drained node",
        "job 2, start 4: runs for 00:00:12 of 00:10:00 on n[1-2]",
        "node n2 is drained: bad disk",
        "> once it is repaired: scontrol update NodeName=n2 State=resume",
    ]


def test_json(tmp_path: Path, slurm: dict[str, str]) -> None:
    run_dir = submitted(make(tmp_path / "one", step=100), 2)
    ended = patchline("status", str(run_dir), str(run_dir), "--json", environ=slurm)
    first, second = [json.loads(line) for line in ended.output.splitlines()]
    assert first == second
    assert (first["run"], first["step"], first["jobs"][0]["job"], len(first["findings"])) == ("one", 100, "2", 2)


def test_what_the_folder_says(tmp_path: Path, slurm: dict[str, str]) -> None:
    run_dir = submitted(make(tmp_path / "one", step=100))
    (run_dir / "STOP").touch()
    (run_dir / "submit" / "gave-up").touch()
    (run_dir / "submit" / "a-1.out").write_text("0: OSError: [Errno 28] No space left on device\n")
    (run_dir / "DONE").write_text("{}")  # of the shorter run that this one extends
    said = patchline("status", str(run_dir), environ=slurm).output
    for words in ("is asked to stop", "has given up: tries in a row saved nothing new", "a disk is full"):
        assert words in said


def test_without_slurm(tmp_path: Path) -> None:
    run_dir = submitted(make(tmp_path / "one", step=100), 2)
    environ = {"PATH": str(tmp_path)}
    ended = patchline("status", str(run_dir), environ=environ)
    assert ended.code == 0
    assert "one" in ended.output
    assert "no Slurm on this machine" in ended.errors
    before = Path.cwd()
    os.chdir(run_dir)
    try:
        assert "100/300" in patchline("status", environ=environ).output, "the folder here, if none is named"
    finally:
        os.chdir(before)


def test_a_fault_after_which_a_job_continues_the_run(tmp_path: Path, slurm: dict[str, str]) -> None:
    """As between two tries: the ranks ended with 74, step 100 is saved, and nobody has to do anything."""
    run_dir = submitted(make(tmp_path / "one", step=100), 7)
    (run_dir / "metrics.jsonl").write_text('{"step": 105, "loss": 1.0}\n')
    os.utime(run_dir / "metrics.jsonl", (1e9, 1e9))
    (run_dir / "submit" / "tries.jsonl").write_text(json.dumps(FAULT) + "\n")
    (run_dir / "submit" / "exits-7-1-0").mkdir()
    said = patchline("status", str(run_dir), environ=slurm).output
    assert said.splitlines()[1].split()[2:4] == ["interrupted", "105/300"]
    words = "its last try ended by a fault outside the program: storage, a disk, a lost worker or rank (exit code 74)"
    assert f"{words}, and is to be" in " ".join(said.split())
    found = json.loads(patchline("status", str(run_dir), "--json", environ=slurm).output)
    assert (found["state"], found["continued_by"]) == ("failed", "7")
    head, *_ = patchline("doctor", str(run_dir), environ=slurm).output.splitlines()
    assert head.endswith("ended by a fault, continued by job 7, step 105/300")
    (run_dir / "submit" / "exits-7-1-1").mkdir()  # the next try has begun
    assert "its last try" not in patchline("status", str(run_dir), environ=slurm).output
    assert " failed " in patchline("status", str(run_dir), environ={"PATH": "/nowhere"}).output


def test_a_job_that_was_asked_to_stop_did_not_fail(tmp_path: Path, slurm: dict[str, str]) -> None:
    """It ends with 78, so that nothing starts it again. Of another job, the same code is a failure."""
    failed = WAITING.replace("PENDING Reason=launch_failed_requeued_held", "FAILED Reason=NonZeroExitCode")
    (tmp_path / "bin" / "7").write_text(failed.replace("ExitCode=0:0", "ExitCode=78:0"))
    run_dir = submitted(make(tmp_path / "one", step=100), 7)
    (run_dir / "submit" / "tries.jsonl").write_text(json.dumps(FAULT | {"end": "told to stop"}) + "\n")
    said = patchline("status", str(run_dir), environ=slurm).output
    assert "job 7, start 2: was stopped by the run's file STOP, as asked" in said
    (run_dir / "submit" / "tries.jsonl").write_text(json.dumps(FAULT | {"end": "told to stop", "job": 6}) + "\n")
    assert "job 7, start 2: gave up" in patchline("status", str(run_dir), environ=slurm).output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "'nowhere' is neither a run nor a chain: it has no job.yaml"),
        (["--jsn"], "there is no flag --jsn; usage: patchline status [RUN|CHAIN ...] [--json]"),
    ],
)
def test_mistakes(tmp_path: Path, words: list[str], message: str) -> None:
    ended = patchline("status", *words)
    assert ended.code == 2
    assert message in " ".join(ended.errors.split())


def test_a_silent_slurm_is_one_message(tmp_path: Path) -> None:
    """As while the controller restarts. It is asked once, and a job may wait: nothing says that none does."""
    one, two = submitted(make(tmp_path / "one", step=100), 2, 3, 4), submitted(make(tmp_path / "two"), 5)
    environ = programs(tmp_path, scontrol=f'echo "$4" >>{tmp_path}/asked; {SILENT}')
    ended = patchline("status", str(one), str(two), environ=environ)
    assert (ended.code, "100/300" in ended.output) == (0, True)
    assert " ".join(ended.errors.split()).count("scontrol does not answer: slurm_load_jobs error: Unable to") == 1
    assert (tmp_path / "asked").read_text() == "4\n"
    assert "not started" in ended.output
    assert "never started" not in ended.output
    found = [json.loads(line) for line in patchline("status", str(one), "--json", environ=environ).output.splitlines()]
    assert found[0]["complaint"].startswith("scontrol does not answer")


def test_a_run_whose_job_has_not_started_is_a_run(tmp_path: Path, slurm: dict[str, str]) -> None:
    """The first question after a submission: there is a folder with a record of the job, and nothing else."""
    (tmp_path / "one").mkdir()
    ended = patchline("status", str(submitted(tmp_path / "one", 7)), environ=slurm)
    assert (ended.code, ended.errors) == (0, "")
    assert "job 7, start 2: is held: a node could not start it" in ended.output
    assert "missing" not in ended.output


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
def packing_slurm(tmp_path: Path) -> dict[str, str]:
    """Job 7 waits, and is to write pk."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "7").write_text(f"{WAITING} StdErr=/x/pack-digits-7.out\n")
    return programs(
        folder,
        squeue=f"echo '7 PENDING 0 9 {output_name(str(tmp_path / 'pk'))}'",
        scontrol=f'cat "{folder}/$4" || exit 1',
        sbatch="echo 8",
    )


def test_status_of_what_a_job_is_to_write(tmp_path: Path, packing_slurm: dict[str, str]) -> None:
    """The folder need not be there yet."""
    pk = str(tmp_path / "pk")
    ended = patchline("status", pk, environ=packing_slurm)
    assert (ended.code, ended.output.splitlines()) == (
        0,
        [
            pk,
            "  job 7, a: is held: a node could not start it, so Slurm requeued it",
            "  > scontrol release 7; `sinfo -R` may name a drained node",
            "  its log: /x/pack-digits-7.out",
        ],
    ), ended.errors
    as_json = json.loads(patchline("status", pk, "--json", environ=packing_slurm).output)
    assert (as_json["output"], as_json["jobs"][0]["job"]) == (pk, "7")
    other = patchline("status", str(tmp_path), environ=packing_slurm)
    assert (other.code, "is neither a run nor a chain" in other.errors) == (2, True), other.errors


def test_it_is_not_submitted_twice(tmp_path: Path, packing_slurm: dict[str, str]) -> None:
    (tmp_path / "cluster.yaml").write_text("command: [patchline]\n")
    words = ("pack", "digits", "--out", f"{tmp_path}/pk/", f"--cluster={tmp_path}/cluster.yaml", "--dry-run")
    ended = patchline("submit", *words, environ=packing_slurm)
    assert (ended.code, "has a job already: 7 PENDING" in ended.errors) == (0, True), ended.errors


def test_without_an_answer_nothing_is_known(tmp_path: Path) -> None:
    environ = programs(tmp_path, squeue="exit 1")
    assert outputs_in([str(tmp_path / "pk")], environ) == {}
    assert output_lines({}) == []
