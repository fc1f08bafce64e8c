"""Steps of a chain: what a file may say, and the units that they become."""

from pathlib import Path

import pytest

from jobs.arguments import value_in
from jobs.chains.steps import ChainConfig, StepConfig, read_chain, units_of
from jobs.submittable import run_name
from shards.errors import UserError

EXAMPLE = Path(__file__).resolve().parents[3] / "slurm" / "chain.example.yaml"
PACK = StepConfig(name="pack", stage="pack", recipe="digits", tasks=4, at_once=2, cpus=3)
TRAIN = StepConfig(name="train", stage="pretrain", recipe="digits_smoke", data="pack", nodes=2, flags=("--steps=9",))
SWEEP = StepConfig(
    name="sweep",
    stage="finetune",
    recipe="digits_48",
    data="pack",
    weights="train",
    variants=(("--seed=1",), ("--seed=2",)),
)
SCORES = StepConfig(name="scores", stage="evaluate", data="pack", weights="sweep")
REPORT = StepConfig(name="report", stage="report", run="train", after=("train",))


def test_the_example_is_valid_and_scores_images_that_no_run_has_seen() -> None:
    chain = read_chain(EXAMPLE)
    assert [step.name for step in chain.steps] == ["pack", "checked", "pretrain", "finetune", "evaluate", "report"]
    assert chain.steps[3].variants == (("--schedule.learning-rate=0.01",), ("--schedule.learning-rate=0.03",))
    assert any(flag.startswith("--split-test=") for flag in chain.steps[0].flags)
    for unit in units_of(chain):
        if unit.stage in ("pretrain", "finetune", "evaluate"):
            suffix = "-test" if unit.stage == "evaluate" else ""
            assert {value_in(words, "--data.url") for words in unit.words} == {f"/shared/birds/pack{suffix}"}
    assert all(step.time for step in chain.steps), "none takes a training run's limit"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("steps: []", "folder is missing", id="no folder"),
        pytest.param("folder: f\nsteps: []", "steps is missing", id="no steps"),
        pytest.param("folder: s3://b/f\nsteps: [{name: a, stage: report}]", "a folder that all nodes share", id="S3"),
        pytest.param("folder: f\nstepz: []\nsteps: []", "unknown field stepz; did you mean steps?", id="a field"),
        pytest.param(
            "folder: f\nsteps: [{name: a, stage: pack, taks: 3}]", "unknown field steps.0.taks", id="of a step"
        ),
        pytest.param("folder: f\nsteps: [{name: a}]", "steps.0.stage is missing", id="no stage"),
        pytest.param("folder: f\nsteps: [{name: a, stage: pretrian}]", "did you mean pretrain?", id="a stage"),
        pytest.param("folder: f\nsteps: [{name: A b, stage: pack}]", "name is 'A b'; allowed: small", id="a name"),
        pytest.param("folder: f\nsteps: [{name: chain, stage: pack}]", "and not 'chain'", id="the state's name"),
        pytest.param("folder: f\nsteps: [{name: a, stage: pack, data: b}]", "pack takes no `data:`", id="input"),
        pytest.param("folder: f\nsteps: [{name: a, stage: pack, flags: [x]}]", "allowed: --name=value", id="flags"),
        pytest.param("folder: f\nsteps: [{name: a, stage: pack, time: soon}]", "time is 'soon'", id="time"),
        pytest.param("folder: f\nsteps: [{name: a, stage: pretrain, tasks: 3}]", "tasks is of pack", id="tasks"),
        pytest.param("folder: f\nsteps: [{name: a, stage: pack, nodes: 3}]", "runs on one node", id="nodes"),
        pytest.param("folder: f\nsteps: [{name: a, stage: pack, variants: [[--x]]}]", "no variants", id="variants"),
        pytest.param("folder: f\nsteps: [{name: a, stage: pack}, {name: a, stage: pack}]", "two steps", id="twice"),
        pytest.param(
            "folder: f\nsteps: [{name: pack, stage: pack}, {name: b, stage: verify, data: pakc}]",
            "names 'pakc'; did you mean pack? allowed: a step before it: pack",
            id="another step",
        ),
        pytest.param("- a", "has no fields", id="a list"),
    ],
)
def test_mistakes(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "chain.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as found:
        read_chain(path)
    assert message in str(found.value)
    assert str(path) in str(found.value)


def chain(*steps: StepConfig) -> ChainConfig:
    return ChainConfig(folder="/shared/my chain", steps=steps)


def test_a_whole_chain() -> None:
    units = {unit.name: unit for unit in units_of(chain(PACK, TRAIN, SWEEP, SCORES, REPORT))}
    assert list(units) == [
        *("pack.scan", "pack.plan", "pack.shards", "pack.merge", "train", "sweep", "scores", "report"),
    ]
    assert units["pack.shards"].words == (
        ("pack", "digits", "--workers=3", "--out=/shared/my chain/pack", "--phase=shards"),
    )
    assert [units[f"pack.{phase}"].num_tasks for phase in ("scan", "plan", "shards", "merge")] == [4, 1, 4, 1]
    assert units["train"].after == ("pack.merge",)
    assert units["sweep"].run_dirs() == ["/shared/my chain/sweep/0", "/shared/my chain/sweep/1"]
    assert "--initial.weights=/shared/my chain/train/weights" in units["sweep"].words[1]
    assert "/shared/my chain/sweep/1/weights" in units["scores"].words[1]
    assert (units["report"].words, units["report"].after) == ((("report", "/shared/my chain/train"),), ("train",))


def test_folders_that_are_given_count() -> None:
    given = StepConfig(name="t", stage="pretrain", recipe="r", flags=("--run-dir=/elsewhere", "--data.url=d"))
    report = StepConfig(name="report", stage="report", run="t")
    units = units_of(chain(given, report))
    assert units[1].words == (("report", "/elsewhere"),)


@pytest.mark.parametrize("run_dir", ["chain", "chain/", "x/../chain/jobs", "link"])
def test_no_step_writes_to_the_folder_of_the_chains_state(tmp_path: Path, run_dir: str) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "chain")
    step = StepConfig(name="a", stage="pretrain", recipe="r", flags=(f"--run-dir={tmp_path}/{run_dir}",))
    with pytest.raises(UserError):
        units_of(ChainConfig(folder=str(tmp_path), steps=(step,)))
    beside = StepConfig(name="a", stage="pretrain", recipe="r", flags=(f"--run-dir={tmp_path}/chains",))
    assert units_of(ChainConfig(folder=str(tmp_path), steps=(beside,)))


def test_runs_have_the_names_of_their_folders(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "runs")
    direct, linked = (
        units_of(chain(StepConfig(name="t", stage="pretrain", recipe="r", flags=(f"--run-dir={tmp_path}/{name}/1",))))
        for name in ("runs", "link")
    )
    assert direct[0].names == linked[0].names == (run_name(f"{tmp_path}/link/../runs/1"),)
    assert units_of(chain(PACK))[0].names == ("",)
