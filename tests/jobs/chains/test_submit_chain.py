"""Submitting a chain again, with Slurm's programs as scripts; tests/slurm/test_chain.py has real ones."""

from pathlib import Path

from jobs.chains.state import PLAN, RECORD, ending, state_folder
from tests.jobs.cluster.test_slurm import programs
from tests.rigs.processes import patchline

STEP = "{name: pack, stage: pack, recipe: digits, flags: [--samples-per-shard=%s, --out=%s]}"


def chain_file(folder: Path, *steps: str) -> str:
    path = folder / "chain.yaml"
    path.write_text("\n".join([f"folder: {folder}/again", "steps:", *(f"- {step}" for step in steps), ""]))
    (folder / "cluster.yaml").write_text("partition: main\n")
    return str(path)


def slurm(folder: Path, *, sbatch: str = "echo 9") -> dict[str, str]:
    answers = f'case $* in *--test-only*) echo "to start at now" >&2;; *) {sbatch};; esac'
    return programs(folder, sbatch=answers, squeue="true", scontrol="true", sinfo="true")


def test_a_refused_submission_leaves_the_chain_as_it_was(digits_url: str, tmp_path: Path) -> None:
    words = ("submit", chain_file(tmp_path, STEP % (256, digits_url)), f"--cluster={tmp_path}/cluster.yaml")
    ended = patchline(*words, "--no-check", environ=slurm(tmp_path))
    assert (ended.code, "all of the chain is done" in ended.errors) == (0, True), ended.errors
    state = state_folder(f"{tmp_path}/again")
    before = {name: (state / name).read_bytes() for name in (PLAN, RECORD, "done")}
    chain_file(tmp_path, STEP % (77, digits_url))
    ended = patchline(*words, "--no-check", environ=slurm(tmp_path))
    said = " ".join(ended.errors.split())
    assert (ended.code, "step pack: " in said, "is planned with other settings" in said) == (2, True, True), said
    assert {name: (state / name).read_bytes() for name in before} == before


def test_a_submission_that_slurm_refuses_ends_the_chain_with_its_message(tmp_path: Path) -> None:
    """Else status would say that the step waits for its turn, and jobs of a part of it would have no gate."""
    words = ("submit", chain_file(tmp_path, STEP % (77, tmp_path / "d")), f"--cluster={tmp_path}/cluster.yaml")
    ended = patchline(*words, "--no-check", environ=slurm(tmp_path, sbatch="echo 'error: too many' >&2; exit 1"))
    assert (ended.code, "sbatch failed: error: too many" in ended.errors) == (2, True), ended.errors
    state = state_folder(f"{tmp_path}/again")
    assert (state / "gave-up").read_text() == "sbatch failed: error: too many\n"
    ended = patchline(*words, "--no-check", environ=slurm(tmp_path))
    assert (ended.code, ending(state)) == (0, ""), ended.errors
