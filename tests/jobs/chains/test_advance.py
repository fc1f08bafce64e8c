"""Gates when Slurm is away or refuses: programs that stand in for Slurm's."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from jobs import exit_codes
from jobs.chains import advance
from jobs.chains.advance import requests_of
from jobs.chains.done import idle_rounds
from jobs.chains.state import (
    GATE,
    ChainJob,
    ChainPlan,
    add_line,
    begin,
    plan_json,
    read_record_of,
    state_folder,
)
from jobs.chains.steps import Unit
from shards.errors import StorageError, UnreachableError
from tests.rigs.processes import patchline
from tests.rigs.small_disk import small_disk

NAME = "patchline-chain-0"
UNIT = Unit(name="report", step="report", stage="report", words=(("report", "run"),))


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(advance, "_PAUSE_SECONDS", 0.01)
    found = state_folder(str(tmp_path / "a chain"))
    found.mkdir(parents=True)
    plan = ChainPlan(name=NAME, units=(UNIT,), rounds=1, chdir=str(tmp_path), command=("patchline",))
    (found / "plan.json").write_text(plan_json(plan))
    (found / "cluster.yaml").write_text("partition: main\n")
    add_line(found, began=True)
    return found


def programs(folder: Path, **lines: str) -> dict[str, str]:
    """An environment in which Slurm's programs are these lines of shell."""
    for name, line in lines.items():
        path = folder / name
        path.write_text(f"#!/bin/sh\n{line}\n")
        path.chmod(0o755)
    return {"PATH": f"{folder}:/usr/bin:/bin"}


def run_gate(state: Path, environ: dict[str, str]) -> int:
    return advance.gate([str(state.parent), "report"], override=lambda job, _words, _command: job, environ=environ)


def test_a_controller_that_comes_back_is_asked_again(state: Path, tmp_path: Path) -> None:
    squeue = f'test -e "{tmp_path}/up" && exit 0; touch "{tmp_path}/up"; exit 1'
    assert run_gate(state, programs(tmp_path, squeue=squeue, sbatch="echo 12")) == exit_codes.DONE
    jobs = read_record_of(state).jobs
    assert [(job.kind, job.job) for job in jobs] == [("job", 12), ("gate", 12)], "Slurm may use a number again"
    assert not (state / "gave-up").exists()


def test_a_controller_that_stays_away_is_a_crash(state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advance, "PATIENCE_SECONDS", 0.1)
    assert run_gate(state, programs(tmp_path, squeue="exit 1")) == exit_codes.CRASH
    assert not (state / "gave-up").exists()


def test_a_refusal_ends_the_chain_with_its_message(state: Path, tmp_path: Path) -> None:
    environ = programs(tmp_path, squeue="exit 0", sbatch="echo 'error: no such account' >&2; exit 1")
    assert run_gate(state, environ) == exit_codes.WILL_NOT_SUCCEED
    assert (state / "gave-up").read_text() == "sbatch failed: error: no such account\n"
    assert run_gate(state, environ) == exit_codes.WILL_NOT_SUCCEED, "and again"


def test_a_job_that_was_submitted_before_a_crash_is_found_in_the_queue(state: Path, tmp_path: Path) -> None:
    comments = f"-,{NAME}"
    squeue = (
        f"echo '7 COMPLETED 0 9 {comments},report.e1.r0.p0'"
        f"; case $* in *states=all*) echo '8 PENDING 0 9 {comments},{GATE}.report.e1.r0';; esac"
    )
    environ = programs(tmp_path, squeue=squeue, sbatch=f'touch "{tmp_path}/submitted"; echo 9')
    advance.submit_unit(
        advance.open_chain(state, environ=environ, override=lambda job, _words, _command: job),
        UNIT,
        [0],
        number=0,
        epoch=1,
    )
    assert [job.job for job in read_record_of(state).jobs] == [7]
    assert not (tmp_path / "submitted").exists()


def test_a_job_of_a_chain_that_was_deleted_is_no_job_of_this_one(state: Path, tmp_path: Path) -> None:
    """The chain has the same name, and its jobs the same tags, as the chain that was in the folder before."""
    begin(state)
    life = read_record_of(state).life
    ended = f"echo '7 COMPLETED 0 9 life-0,-,{NAME},report.e2.r0.p0'"
    opened = advance.open_chain(
        state,
        environ=programs(tmp_path, squeue=ended, sbatch="echo 9"),
        override=lambda job, _words, _command: job,
    )
    assert advance.submit_unit(opened, UNIT, [0], number=0, epoch=2) == [9]
    script = (state / "jobs" / "report.e2.r0.p0.sbatch").read_text()
    assert f"--comment={life},-,{NAME},report.e2.r0.p0\n" in script
    programs(tmp_path, squeue=ended.replace("life-0", life), sbatch="echo 10")
    assert advance.submit_unit(opened, UNIT, [0], number=0, epoch=2) == [7], "submitted just before a crash"


def test_rounds_are_bounded(state: Path, tmp_path: Path) -> None:
    environ = programs(tmp_path, squeue="exit 0", sbatch=numbering(tmp_path))
    assert [run_gate(state, environ) for _ in range(3)] == [0, 0, exit_codes.WILL_NOT_SUCCEED]
    assert "report is not complete: it was submitted 2 times in a row without" in (state / "gave-up").read_text()


def numbering(folder: Path) -> str:
    """An sbatch that answers 1, 2, 3 and so on."""
    return f'n=$(cat "{folder}/n" 2>/dev/null || echo 0); echo $((n + 1)) | tee "{folder}/n"'


def test_a_round_that_brought_something_does_not_count() -> None:
    def jobs(*rounds: tuple[tuple[int, ...], int]) -> list[ChainJob]:
        return [
            ChainJob(unit="u", kind="job", round=number, tag="t", job=1, tasks=tasks, steps=(steps,))
            for number, (tasks, steps) in enumerate(rounds)
        ]

    one = ((0,), 0)
    assert idle_rounds([], [0], [0]) == 0
    assert idle_rounds(jobs(one, one, one), [0], [0]) == 3
    assert idle_rounds(jobs(one, one, one), [0], [5]) == 0, "the last of them has saved"
    assert idle_rounds(jobs(one, ((0,), 5), ((0,), 5)), [0], [5]) == 2
    assert idle_rounds(jobs(((0, 1, 2, 3), 0), ((1, 2), 0), ((1, 2), 0)), [1, 2], [0]) == 2
    assert idle_rounds(jobs(((0, 1, 2, 3), 0), ((1, 2), 0), ((1, 2), 0)), [2], [0]) == 0


def test_a_second_gate_where_jobs_are_not_requeued(state: Path, tmp_path: Path) -> None:
    (state / "cluster.yaml").write_text("requeue: no\n")
    assert run_gate(state, programs(tmp_path, squeue="exit 0", sbatch=numbering(tmp_path))) == exit_codes.DONE
    assert [(job.kind, job.tag) for job in read_record_of(state).jobs] == [
        ("job", "report.e1.r0"),
        ("gate", "gate.report.e1.r0"),
        ("gate", "gate.report.e1.r0.second"),
    ]
    assert "#SBATCH --dependency=afterany:2\n" in (state / "jobs" / "gate.report.e1.r0.second.sbatch").read_text()


@pytest.mark.parametrize("comment", ["patchline-r", "patchline-x@2,patchline-r@3,patchline-chain-9,t.e1.r0.p0"])
def test_a_job_of_the_run_itself_is_waited_for(state: Path, tmp_path: Path, comment: str) -> None:
    """Somebody submitted the run without the chain, or with another chain. The gate then waits for that job."""
    unit = replace(UNIT, names=("patchline-r",))
    plan = ChainPlan(name=NAME, units=(unit,), rounds=1, chdir=str(tmp_path), command=("patchline",))
    (state / "plan.json").write_text(plan_json(plan))
    environ = programs(tmp_path, squeue=f"echo '7_[2-3] PENDING 0 9 {comment}'", sbatch=numbering(tmp_path))
    assert run_gate(state, environ) == exit_codes.DONE
    assert [(job.kind, job.tag) for job in read_record_of(state).jobs] == [("gate", "gate.report.e1.r0.g0")]
    assert "#SBATCH --dependency=afterany:7\n" in (state / "jobs" / "gate.report.e1.r0.g0.sbatch").read_text()


def test_jobs_from_before_a_new_beginning_count(state: Path, tmp_path: Path) -> None:
    add_line(state, began=True)
    squeue = f"echo '7 RUNNING 0 9 -,{NAME},report.e1.r0.p0'; echo '8 PENDING 0 9 -,{NAME},{GATE}.report.e1.r0'"
    environ = programs(tmp_path, squeue=squeue, sbatch=f'touch "{tmp_path}/submitted"; echo 9')
    assert run_gate(state, environ) == exit_codes.DONE
    assert not (tmp_path / "submitted").exists()


def test_the_runs_of_an_array_are_in_its_comment(state: Path) -> None:
    """The comment names at most 24 runs, since Slurm accepts 1,023 characters."""
    words = tuple(("finetune", "r", f"--run-dir=r{number}") for number in range(30))
    names = tuple(f"patchline-{number:016}" for number in range(30))
    unit = Unit(name="a" * 32, step="a", stage="finetune", words=words, names=names, at_once=2)
    chain = advance.open_chain(state, environ={}, override=lambda job, _words, _command: job)
    made = requests_of(chain, unit, [1, *range(3, 30)], tag=f"{'a' * 32}.e10.r10", most=1001)
    assert [piece.array for _, piece in made] == ["1,3-23%1", "0-5%1"]
    comments = [request.comment.split(",") for request, _ in made]
    assert comments[0][:2] == [f"{names[1]}@1", f"{names[3]}@3"]
    assert comments[1] == [*(f"{names[24 + index]}@{index}" for index in range(6)), NAME, f"{'a' * 32}.e10.r10.p1"]
    assert max(len(request.comment) for request, _ in made) < 1024


def test_storage_that_is_away_is_no_reason_to_give_up(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = [StorageError("503"), *[UnreachableError("no answer")] * 4]

    def missing(*_: object, **__: object) -> list[int]:
        if errors:
            raise errors.pop()
        return []

    monkeypatch.setattr(advance, "missing_tasks", missing)
    assert run_gate(state, programs(tmp_path, squeue="exit 0")) == exit_codes.DONE
    assert (state / "done").exists()


def test_a_full_disk_is_no_reason_to_give_up(state: Path, tmp_path: Path) -> None:
    """The disk fills up when the first job is submitted, and has room again while the gate repeats its attempts."""
    with small_disk(tmp_path / "disk", num_bytes=1 << 20) as disk:
        folder, filler, asked = disk / "a chain", disk / "filler", tmp_path / "asked"
        shutil.copytree(state.parent, folder)
        fills = f'echo 7; test -e "{asked}" || {{ touch "{asked}"; cat /dev/zero >"{filler}" 2>/dev/null; }}; exit 0'
        told = f"echo '7 PENDING 0 9 -,{NAME},report.e1.r0.p0'"
        frees = f'echo again >>"{asked}"; test $(wc -l <"{asked}") -lt 5 || rm -f "{filler}"'
        environ = programs(tmp_path, squeue=f'test -e "{asked}" || exit 0; {told}; {frees}', sbatch=fills)
        assert run_gate(folder / "chain", environ) == exit_codes.DONE
        scripts = [path.read_text() for path in (folder / "chain" / "jobs").glob(f"{GATE}.*.sbatch")]
        assert any("__gate" in text for text in scripts), "the gate behind the job was submitted once there was room"
        assert not (folder / "chain" / "gave-up").exists()


def test_an_array_beyond_slurms_limit_is_submitted_in_pieces(state: Path, tmp_path: Path) -> None:
    """There are two pieces with two tasks and one with one task, in two queues, since two tasks may run at once."""
    unit = Unit(
        name="pack.scan", step="pack", stage="pack", words=(("pack", "digits", "--out=d"),), num_parts=5, at_once=2
    )
    environ = programs(
        tmp_path, squeue="exit 0", sbatch=numbering(tmp_path), scontrol="echo 'MaxArraySize            = 2'"
    )
    opened = advance.open_chain(state, environ=environ, override=lambda job, _words, _command: job)
    assert advance.submit_unit(opened, unit, [0, 1, 2, 3, 4], number=0, epoch=1) == [1, 2, 3]
    scripts = [(state / "jobs" / f"pack.scan.e1.r0.p{piece}.sbatch").read_text() for piece in range(3)]
    for script, array, offset in zip(scripts, ("0-1%1", "0-1%1", "0%1"), (0, 2, 4), strict=True):
        assert f"#SBATCH --array={array}\n" in script
        assert f"\npatchline_task=$(({offset} + SLURM_ARRAY_TASK_ID))\n" in script
        assert '\nset -- "$@" "--part=$patchline_task/5"\n' in script
    assert ["--dependency" in script for script in scripts] == [False, False, True]
    assert "#SBATCH --dependency=afterany:1\n" in scripts[2]
    assert [job.tasks for job in read_record_of(state).jobs] == [(0, 1), (2, 3), (4,)]


def test_a_refusal_of_slurm_names_the_job(tmp_path: Path) -> None:
    """A chain has many scripts, and the limits of its gates differ from those of its steps."""
    steps = "[{name: one, stage: pack, recipe: digits}, {name: two, stage: pack, recipe: digits}]"
    (tmp_path / "chain.yaml").write_text(f"folder: '{tmp_path}/a'\nsteps: {steps}\n")
    (tmp_path / "cluster.yaml").write_text("command: [patchline]\n")
    sbatch = "grep -q 'job-name=two' && { echo 'sbatch: error: Requested time limit is invalid' >&2; exit 1; }; exit 0"
    words = ("submit", f"{tmp_path}/chain.yaml", "--cluster", f"{tmp_path}/cluster.yaml", "--no-check")
    ended = patchline(*words, environ=programs(tmp_path, sbatch=sbatch, squeue="exit 0", scontrol="exit 1"))
    assert ended.code == 2, ended
    said = " ".join(ended.errors.split())
    assert "Slurm would refuse the job two: Requested time limit is invalid; lower `time:` of the step" in said
    assert not (tmp_path / "a").exists()
