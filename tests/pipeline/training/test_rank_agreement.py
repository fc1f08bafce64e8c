"""Ranks that are about to run different things say which rank has what, and none of them starts."""

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from jobs.recipes.pretrain import digits_smoke
from pipeline.ranks.world import World
from pipeline.training.prepare import code_facts, disagreements, facts_to_agree, prepare, refuse_disagreement
from pipeline.training.zero.loading import TESTED
from shards.errors import UserError
from tests.rigs.forked_ranks import fork_ranks
from tests.rigs.forks import ONE_THREAD
from tests.rigs.processes import one_world, run_ranks
from tests.rigs.training import pretrain_words

CHECKOUT = Path(__file__).resolve().parents[3]


def ranks_with(name: str, *values: str | None) -> list[dict[str, str]]:
    """The facts of ranks that agree in one thing and have these values of another."""
    return [{"python": "3.11.7", **({} if value is None else {name: value})} for value in values]


@pytest.mark.parametrize(
    ("facts", "lines"),
    [
        (ranks_with("torch", *["2.13.0"] * 4), []),
        (ranks_with("torch", "2.13.0", "2.12.0"), ["torch: rank 1: 2.12.0; rank 0: 2.13.0"]),
        (
            ranks_with("torch", *("2.12.0" if rank in (3, 7) else "2.13.0" for rank in range(16))),
            ["torch: ranks 3, 7: 2.12.0; the other 14: 2.13.0"],
        ),
        (  # whole nodes
            ranks_with("numpy", *("1.26" if 8 <= rank < 16 or rank == 40 else "2.0" for rank in range(64))),
            ["numpy: ranks 8-15, 40: 1.26; the other 55: 2.0"],
        ),
        (ranks_with("dataset", "a", "b", "c", "c"), ["dataset: rank 1: b; rank 0: a; the other 2: c"]),
        (ranks_with("decoder.pillow", "11.0", None, "11.0"), ["decoder.pillow: rank 1: missing; the other 2: 11.0"]),
        (
            [{"seed": "1", "steps": "5"}, {"seed": "2", "steps": "6"}],
            ["seed: rank 1: 2; rank 0: 1", "steps: rank 1: 6; rank 0: 5"],
        ),
    ],
)
def test_messages(facts: list[dict[str, str]], lines: list[str]) -> None:
    assert disagreements(facts) == lines


def test_many_files_count_as_one_thing() -> None:
    facts = [{f"code pipeline/{number}.py": f"{number}-{old}" for number in range(5)} for old in (0, 1, 0)]
    (line,) = disagreements(facts)
    files = r"pipeline/0\.py, pipeline/1\.py, pipeline/2\.py and 2 other files"
    found = re.fullmatch(rf"code, in {files}: rank 1: ([0-9a-f]{{8}}); the other 2: ([0-9a-f]{{8}})", line)
    assert found, line
    assert found[1] != found[2]


def everything(run_dir: Path, url: str) -> dict[str, str]:
    """The facts of a small job."""
    job = digits_smoke()
    return facts_to_agree(prepare(replace(job, run_dir=str(run_dir), data=replace(job.data, url=url)), one_world()))


def test_what_is_compared(digits_url: str, run_dir: Path) -> None:
    facts = everything(run_dir, digits_url)
    assert facts["deepspeed"] == TESTED[-1]
    names = ("python", "patchline", "torch", "numpy", "decoder.version", "decoder.pillow", "dataset", "torch.compile")
    assert all(
        facts[name] for name in (*names, "held-out dataset", "bf16", "order_version", "seed", "engine.zero_stage")
    )
    assert facts["schedule.learning_rate"] == "0.001"
    assert facts["code pipeline/training/run.py"]


def test_what_ranks_need_not_choose_is_not_compared(digits_url: str, run_dir: Path) -> None:
    job = digits_smoke()
    engine = replace(job.engine, precision="fp32", compile="off")
    job = replace(job, run_dir=str(run_dir), data=replace(job.data, url=digits_url), engine=engine)
    assert not {"bf16", "torch.compile"} & facts_to_agree(prepare(job, one_world())).keys()


def test_every_line_of_code_counts(tmp_path: Path) -> None:
    (tmp_path / "pipeline").mkdir()
    file = tmp_path / "pipeline" / "some.py"
    file.write_text("a = 1\n")
    before = code_facts(tmp_path)
    file.write_text("a = 2\n")
    after = code_facts(tmp_path)
    assert [*before] == [*after] == ["code pipeline/some.py"]
    assert before != after
    own = {name.removeprefix("code ") for name in code_facts(CHECKOUT)}
    rooms = [(CHECKOUT / room).rglob("*.py") for room in ("shards", "pipeline", "jobs", "patchline")]
    assert own == {path.relative_to(CHECKOUT).as_posix() for room in rooms for path in room}


def refusal(world: World, facts: dict[str, str], others: dict[int, dict[str, str]]) -> str:
    """What a rank is told; `others`: what some ranks have instead."""
    try:
        refuse_disagreement(facts | others.get(world.rank, {}), device=world.device)
    except UserError as error:
        return str(error)
    return ""


def test_real_ranks_agree_or_are_all_told_the_same(digits_url: str, run_dir: Path) -> None:
    facts = everything(run_dir, digits_url)
    assert run_ranks(refusal, facts, {}, num_ranks=3) == ["", "", ""]
    many = {f"model.x{number}": "other" for number in range(30)}
    said = run_ranks(refusal, facts, {1: {"torch": "2.12.0", **many}}, num_ranks=3)
    assert len(set(said)) == 1
    assert f"\n  torch: rank 1: 2.12.0; the other 2: {facts['torch']}\n" in said[0]
    assert "\n  and 11 more\nStart all ranks with the same command" in said[0]


def test_a_rank_with_another_command_stops_all(
    digits_url: str, run_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    other = ["--schedule.learning-rate", "0.002"]
    words = pretrain_words(digits_url, run_dir)
    environ = {**ONE_THREAD, **os.environ}
    ranks = fork_ranks(words, num_ranks=2, environ=environ, log_dir=tmp_path, more_words={1: other})
    assert [process.wait(60) for process in ranks.processes] == [2, 2]
    expected = "schedule.learning_rate: rank 1: 0.002; rank 0: 0.001"
    for said in (capfd.readouterr().err, (tmp_path / "rank-1.log").read_text()):
        assert said.count(expected) == 1
        assert "Traceback" not in said
    assert not (run_dir / "checkpoints").exists(), "before the first step"
