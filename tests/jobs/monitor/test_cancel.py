"""`patchline cancel`, with Slurm's programs as scripts; tests/slurm/test_chain.py has real ones."""

from pathlib import Path

import pytest

from jobs import exit_codes
from jobs.monitor import ask
from jobs.submittable import output_name, run_name
from shards.errors import UserError
from tests.jobs.cluster.test_slurm import programs


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(ask, "_PAUSE_SECONDS", 0.01)
    found = tmp_path / "a run"
    (found / "submit").mkdir(parents=True)
    return found


def cluster(folder: Path, *lines: str) -> dict[str, str]:
    """A queue of these lines, of which scancel takes those that it is given."""
    (folder / "queue").write_text("".join(f"{line}\n" for line in lines))
    scancel = f'echo "$@" >>"{folder}/cancelled"; for job; do sed -i "/^$job /d" "{folder}/queue"; done'
    return programs(folder, squeue=f'cat "{folder}/queue"', scancel=scancel)


def test_only_the_jobs_of_the_run_are_cancelled(run_dir: Path, tmp_path: Path) -> None:
    name = run_name(str(run_dir))
    environ = cluster(
        tmp_path,
        f"12 RUNNING {name}",
        "13 RUNNING patchline-other",
        f"14_3 RUNNING patchline-other@2,{name}@3,patchline-chain-1,tag",
        f"14_2 RUNNING patchline-other@2,{name}@3,patchline-chain-1,tag",
        f"15 COMPLETING {name}",
    )
    (tmp_path / "link").symlink_to(run_dir)
    assert ask.cancel([str(tmp_path / "link")], environ=environ) == exit_codes.DONE
    assert (tmp_path / "cancelled").read_text() == "12 14_3\n"
    assert (run_dir / "submit" / "cancelled").exists()


def test_a_job_that_does_not_end_is_named(run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ask, "_MOST_SECONDS", 0.05)
    environ = programs(tmp_path, squeue=f"echo '7 RUNNING {run_name(str(run_dir))}'", scancel="true")
    with pytest.raises(UserError, match="7 does not end; see `scontrol show job 7`"):
        ask.cancel([str(run_dir)], environ=environ)


@pytest.mark.parametrize("scancel", ["echo 'Access/permission denied' >&2; exit 1", "exit 1"])
def test_a_cancel_that_fails_leaves_no_marker(run_dir: Path, tmp_path: Path, scancel: str) -> None:
    """Of which a gate would think that the chain is cancelled."""
    environ = programs(tmp_path, squeue=f"echo '7 RUNNING {run_name(str(run_dir))}'", scancel=scancel)
    with pytest.raises(UserError, match="scancel failed"):
        ask.cancel([str(run_dir)], environ=environ)
    assert not (run_dir / "submit" / "cancelled").exists()
    (run_dir / "submit" / "cancelled").touch()  # by an earlier one, which did not fail
    with pytest.raises(UserError, match="scancel failed"):
        ask.cancel([str(run_dir)], environ=environ)
    assert (run_dir / "submit" / "cancelled").exists()


@pytest.mark.parametrize("words", [[], ["a", "b"]])
def test_one_folder_is_needed(words: list[str]) -> None:
    with pytest.raises(UserError, match="usage: patchline cancel"):
        ask.cancel(words, environ={})


def test_a_folder_that_is_neither(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is neither a run nor a chain that was submitted; give its folder"):
        ask.cancel([str(tmp_path)], environ={})


def test_what_a_job_is_to_write(run_dir: Path, tmp_path: Path) -> None:
    """The output of a stage without a run directory, which may be a URL, and not be there yet."""
    environ = cluster(tmp_path, f"7 PENDING {output_name('s3://b/pk')}", f"8 RUNNING {run_name(str(run_dir))}")
    assert ask.cancel(["s3://b/pk/"], environ=environ) == exit_codes.DONE
    assert (tmp_path / "cancelled").read_text() == "7\n"
    with pytest.raises(UserError, match=r"give its folder\. No job that waits or runs is to write it"):
        ask.cancel(["s3://b/pk"], environ=environ)
