"""Gates when Slurm is away or refuses: programs that stand in for Slurm's."""

from pathlib import Path

import pytest

from jobs import chain, exit_codes
from jobs.chain_state import GATE, ChainPlan, add_line, chain_comment, plan_json, read_record_of, state_folder
from jobs.chain_units import Unit
from shards.errors import StorageError, UnreachableError

UNIT = Unit(name="report", step="report", stage="report", words=(("report", "run"),))


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(chain, "_PAUSE_SECONDS", 0.01)
    found = state_folder(str(tmp_path / "a chain"))
    found.mkdir(parents=True)
    plan = ChainPlan(units=(UNIT,), rounds=1, chdir=str(tmp_path), command=("patchline",))
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
    return chain.gate([str(state.parent), "report"], override=lambda job, _words, _command: job, environ=environ)


def test_a_controller_that_comes_back_is_asked_again(state: Path, tmp_path: Path) -> None:
    squeue = f'test -e "{tmp_path}/up" && exit 0; touch "{tmp_path}/up"; exit 1'
    assert run_gate(state, programs(tmp_path, squeue=squeue, sbatch="echo 12")) == exit_codes.DONE
    jobs = read_record_of(state).jobs
    assert [(job.kind, job.job) for job in jobs] == [("job", 12)], "one fake number: the gate's has been seen"
    assert not (state / "gave-up").exists()


def test_a_controller_that_stays_away_is_a_crash(state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain, "PATIENCE_SECONDS", 0.1)
    assert run_gate(state, programs(tmp_path, squeue="exit 1")) == exit_codes.CRASH
    assert not (state / "gave-up").exists()


def test_a_refusal_ends_the_chain_with_its_message(state: Path, tmp_path: Path) -> None:
    environ = programs(tmp_path, squeue="exit 0", sbatch="echo 'error: no such account' >&2; exit 1")
    assert run_gate(state, environ) == exit_codes.WILL_NOT_SUCCEED
    assert (state / "gave-up").read_text() == "sbatch failed: error: no such account\n"
    assert run_gate(state, environ) == exit_codes.WILL_NOT_SUCCEED, "and again"


def test_a_job_that_was_submitted_before_a_crash_is_found_in_the_queue(state: Path, tmp_path: Path) -> None:
    comments = f"-,{chain_comment(state)}"
    squeue = (
        f"echo '7 COMPLETED {comments},report.e1.r0.p0'"
        f"; case $* in *states=all*) echo '8 PENDING {comments},{GATE}.report.e1.r0';; esac"
    )
    environ = programs(tmp_path, squeue=squeue, sbatch=f'touch "{tmp_path}/submitted"; echo 9')
    chain.submit_unit(
        chain.open_chain(state, environ=environ, override=lambda job, _words, _command: job),
        UNIT,
        [0],
        number=0,
        epoch=1,
    )
    assert [job.job for job in read_record_of(state).jobs] == [7]
    assert not (tmp_path / "submitted").exists()


def test_rounds_are_bounded(state: Path, tmp_path: Path) -> None:
    numbers = f'n=$(cat "{tmp_path}/n" 2>/dev/null || echo 0); echo $((n + 1)) | tee "{tmp_path}/n"'
    environ = programs(tmp_path, squeue="exit 0", sbatch=numbers)
    assert [run_gate(state, environ) for _ in range(3)] == [0, 0, exit_codes.WILL_NOT_SUCCEED]
    assert "report is not complete: it was submitted 2 times" in (state / "gave-up").read_text()


def test_storage_that_is_away_is_no_reason_to_give_up(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = [StorageError("503"), *[UnreachableError("no answer")] * 4]

    def missing(*_: object, **__: object) -> list[int]:
        if errors:
            raise errors.pop()
        return []

    monkeypatch.setattr(chain, "missing_tasks", missing)
    assert run_gate(state, programs(tmp_path, squeue="exit 0")) == exit_codes.DONE
    assert (state / "done").exists()


def test_an_array_beyond_slurms_limit_is_submitted_in_pieces(state: Path, tmp_path: Path) -> None:
    """Two pieces of two tasks and one of one, in two queues, since two tasks may run at once."""
    unit = Unit(
        name="pack.scan", step="pack", stage="pack", words=(("pack", "digits", "--out=d"),), num_parts=5, at_once=2
    )
    numbers = f'n=$(cat "{tmp_path}/n" 2>/dev/null || echo 0); echo $((n + 1)) | tee "{tmp_path}/n"'
    environ = programs(tmp_path, squeue="exit 0", sbatch=numbers, scontrol="echo 'MaxArraySize            = 2'")
    opened = chain.open_chain(state, environ=environ, override=lambda job, _words, _command: job)
    assert chain.submit_unit(opened, unit, [0, 1, 2, 3, 4], number=0, epoch=1) == [1, 2, 3]
    scripts = [(state / "jobs" / f"pack.scan.e1.r0.p{piece}.sbatch").read_text() for piece in range(3)]
    for script, array, offset in zip(scripts, ("0-1%1", "0-1%1", "0%1"), (0, 2, 4), strict=True):
        assert f"#SBATCH --array={array}\n" in script
        assert f"\npatchline_task=$(({offset} + SLURM_ARRAY_TASK_ID))\n" in script
        assert '\nset -- "$@" "--part=$patchline_task/5"\n' in script
    assert ["--dependency" in script for script in scripts] == [False, False, True]
    assert "#SBATCH --dependency=afterany:1\n" in scripts[2]
    assert [job.tasks for job in read_record_of(state).jobs] == [(0, 1), (2, 3), (4,)]
