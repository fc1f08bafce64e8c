"""Submitting a chain again, with Slurm's programs as scripts; tests/slurm/test_chain.py has real ones."""

from pathlib import Path

from jobs.chains.state import PLAN, RECORD, ending, state_folder
from jobs.chains.steps import ChainConfig, units_of
from jobs.chains.submit_chain import graph_of
from jobs.cluster.settings import ClusterConfig
from tests.jobs.chains.test_steps import PACK, REPORT, SCORES, SWEEP, TRAIN
from tests.jobs.cluster.test_slurm import SILENT, programs
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
    """Otherwise status would say that the step waits for its turn, and jobs of only a part of it would have no gate."""
    words = ("submit", chain_file(tmp_path, STEP % (77, tmp_path / "d")), f"--cluster={tmp_path}/cluster.yaml")
    ended = patchline(*words, "--no-check", environ=slurm(tmp_path, sbatch="echo 'error: too many' >&2; exit 1"))
    assert (ended.code, "sbatch failed: error: too many" in ended.errors) == (2, True), ended.errors
    state = state_folder(f"{tmp_path}/again")
    assert (state / "gave-up").read_text() == "sbatch failed: error: too many\n"
    ended = patchline(*words, "--no-check", environ=slurm(tmp_path))
    assert (ended.code, ending(state)) == (0, ""), ended.errors


def test_a_graph_has_a_line_for_each_step_with_its_size_and_hours() -> None:
    units = units_of(ChainConfig(folder="/shared/birds", steps=(PACK, TRAIN, SWEEP, SCORES, REPORT)))
    cluster = ClusterConfig(gpus_per_node=8, time_limit="12:00:00", spares=1)
    assert graph_of(units, cluster, folder="/shared/birds").splitlines() == [
        "chain in /shared/birds: 8 steps, 16 jobs, at most 1,056 GPU-hours",
        "",
        "step                      stage     jobs          nodes each  GPUs each  time limit  most GPU-hours",
        "pack.scan                 pack      4, 2 at once           1          -    12:00:00               -",
        "└─ pack.plan              pack      1                      1          -    12:00:00               -",
        "   └─ pack.shards         pack      4, 2 at once           1          -    12:00:00               -",
        "      └─ pack.merge       pack      1                      1          -    12:00:00               -",
        "         └─ train         pretrain  1                      3         24    12:00:00             288",
        "            ├─ sweep      finetune  2                      2         16    12:00:00             384",
        "            │  └─ scores  evaluate  2                      2         16    12:00:00             384",
        "            └─ report     report    1                      1          -    12:00:00               -",
    ]


def test_a_dry_run_works_where_slurm_does_not_answer(tmp_path: Path) -> None:
    """The dry run asks Slurm once, and says what it could not ask."""
    asked = f"echo $0 >>'{tmp_path}/asked'; {SILENT}"
    silent = programs(tmp_path, sbatch=asked, squeue=asked, scontrol=asked, sinfo=asked)
    settings = f"--cluster={tmp_path}/cluster.yaml"
    chain = chain_file(tmp_path, STEP % (256, tmp_path / "d"))
    run = ("pretrain", "digits_smoke", "--data.url=d", f"--run-dir={tmp_path}/run", "--nodes=2")
    for words in ((chain,), run):
        ended = patchline("submit", *words, settings, "--dry-run", environ=silent)
        said = " ".join(ended.errors.split())
        assert (ended.code, "#SBATCH --partition=main" in ended.output) == (0, True), ended.errors
        assert "Slurm does not answer (slurm_load_jobs error: Unable to contact slurm controller" in said
        assert "Slurm was not asked about th" in said
    assert (tmp_path / "asked").read_text().splitlines() == [f"{tmp_path}/squeue"] * 2
    ended = patchline("submit", *run, settings, "--no-check", environ=silent)
    assert (ended.code, "Slurm does not answer" in ended.errors) == (2, True), "no dry run"
