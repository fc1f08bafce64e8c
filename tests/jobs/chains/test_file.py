"""The YAML file of a chain: strict, and each mistake is one message."""

from pathlib import Path

import pytest

from jobs.chains.file import read_chain
from shards.errors import UserError

EXAMPLE = Path(__file__).resolve().parents[3] / "slurm" / "chain.example.yaml"


def test_the_example_is_valid() -> None:
    chain = read_chain(EXAMPLE)
    assert [step.name for step in chain.steps] == ["pack", "checked", "pretrain", "finetune", "evaluate", "report"]
    assert chain.steps[3].variants == (("--schedule.learning-rate=0.01",), ("--schedule.learning-rate=0.03",))
    assert not chain.steps[4].recipe, (
        "a recipe would be the old form of evaluate, and replace the weights' own evaluation"
    )


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


def test_a_file_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(
        UserError,
        match=r"none\.yaml cannot be read: No such file or directory; give a chain, such as .*patchline example",
    ):
        read_chain(tmp_path / "none.yaml")
