"""Steps become units: the words of each task, in the order in which they must be complete."""

from pathlib import Path

import pytest

from jobs.chains.file import ChainConfig, StepConfig
from jobs.chains.units import units_of
from jobs.submittable import run_name
from shards.errors import UserError

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
SCORES = StepConfig(name="scores", stage="evaluate", recipe="resize", data="pack", weights="sweep")
REPORT = StepConfig(name="report", stage="report", run="train", after=("train",))


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
    assert "--weights=/shared/my chain/sweep/1/weights" in units["scores"].words[1]
    assert (units["report"].words, units["report"].after) == ((("report", "/shared/my chain/train"),), ("train",))


def test_folders_that_are_given_count() -> None:
    given = StepConfig(name="t", stage="pretrain", recipe="r", flags=("--run-dir=/elsewhere", "--data.url=d"))
    report = StepConfig(name="report", stage="report", run="t")
    units = units_of(chain(given, report))
    assert units[1].words == (("report", "/elsewhere"),)


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ((PACK, StepConfig(name="r", stage="report", run="pack")), "makes no run"),
        ((PACK, TRAIN, StepConfig(name="v", stage="verify", data="train")), "makes no dataset"),
        ((StepConfig(name="p", stage="pack"),), "needs `recipe:`"),
        ((PACK, StepConfig(name="v", stage="verify", data="pack", recipe="x")), "needs either `data:` or `recipe:`"),
        (
            (
                PACK,
                TRAIN,
                SWEEP,
                StepConfig(name="e", stage="evaluate", recipe="r", weights="sweep", variants=(("--a",), ("--b",))),
            ),
            "both have",
        ),
        (
            tuple(StepConfig(name=n, stage="pretrain", recipe="r", flags=("--run-dir=/one",)) for n in ("a", "b")),
            "a and b both write to /one",
        ),
        (
            tuple(
                StepConfig(name=n, stage="pretrain", recipe="r", flags=(f"--run-dir={path}",))
                for n, path in (("a", "/one/"), ("b", "/x/../one"))
            ),
            "a and b both write to /x/../one",
        ),
        (
            tuple(
                StepConfig(name=n, stage="pack", recipe="digits", tasks=tasks, flags=(f"--out={url}",))
                for n, tasks, url in (("a", 2, "s3://b/x"), ("b", 1, "s3://b/x/"))
            ),
            "a and b both write to s3://b/x/",
        ),
        (
            (
                StepConfig(
                    name="a", stage="pretrain", recipe="r", flags=("--run-dir=/z",), variants=(("--x",), ("--y",))
                ),
            ),
            "two variants of a write to /z",
        ),
    ],
)
def test_steps_that_do_not_fit(steps: tuple[StepConfig, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        units_of(chain(*steps))


@pytest.mark.parametrize("run_dir", ["chain", "chain/", "x/../chain/jobs", "link"])
def test_no_step_writes_to_the_folder_of_the_chains_state(tmp_path: Path, run_dir: str) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "chain")
    step = StepConfig(name="a", stage="pretrain", recipe="r", flags=(f"--run-dir={tmp_path}/{run_dir}",))
    with pytest.raises(UserError, match=r"step a writes to .*, where the chain keeps its state; give another --run"):
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
