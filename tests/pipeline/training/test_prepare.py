"""A job is checked against its data and its ranks before anything starts; whole runs are in test_run.py.

Ranks that are about to run different things say which rank has what, and none of them starts. If the job leaves it
open, a model has as many classes as its data; surplus classes give a warning, missing ones an error.
"""

import io
import logging
import os
import re
import tarfile
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from jobs.data import pack
from jobs.data.index import index_tars
from jobs.data.pack import PackJob, run
from jobs.recipes.pretrain import digits_smoke, masked_patches_pixels
from pipeline.checkpoints.manifest import MANIFEST_NAME, CheckpointId
from pipeline.data.evaluation import label_map
from pipeline.data.training_data import open_training_data
from pipeline.models import build_model
from pipeline.models.loss import balanced_weights
from pipeline.models.weights.folder import save_weights
from pipeline.ranks.world import World
from pipeline.training.decisions import decide_classes, unused_classes
from pipeline.training.prepare import (
    code_facts,
    disagreements,
    facts_to_agree,
    prepare,
    refuse_disagreement,
    refuse_other_head,
)
from pipeline.training.settings.job import EngineConfig, InitialConfig, TrainingJob
from pipeline.training.settings.tokens import TokensConfig
from pipeline.training.zero.loading import TESTED
from shards.config import HeldOutConfig
from shards.dataset import open_dataset
from shards.errors import UserError
from shards.sources.folders import FolderSource
from tests.rigs.forked_ranks import fork_ranks
from tests.rigs.forks import ONE_THREAD
from tests.rigs.images import image_bytes
from tests.rigs.processes import one_world, run_ranks
from tests.rigs.training import pretrain_words

CHECKOUT = Path(__file__).resolve().parents[3]


def job_of(url: str, run_dir: Path) -> TrainingJob:
    base = digits_smoke()
    return replace(
        base, run_dir=str(run_dir), data=replace(base.data, url=url), engine=EngineConfig(compile="off"), seed=3
    )


def test_what_a_job_leaves_open_is_filled_in_and_nothing_is_written(digits_url: str, run_dir: Path) -> None:
    job = job_of(digits_url, run_dir)
    prepared = prepare(job, replace(one_world(1, 2), num_threads=5))
    assert prepared.job == replace(job, model=replace(job.model, num_classes=10))
    assert prepared.plan.num_ranks == prepared.stream.share.num_ranks == 2
    assert prepared.stream.config.num_threads == 5
    start = prepared.stream.start
    assert (start.next_step, start.seed, start.image_size) == (0, 3, job.model.image_size)
    assert prepared.held_out == {}
    assert not run_dir.exists()


def test_an_evaluation_of_the_training_images_is_a_warning(
    digits_url: str, run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = job_of(digits_url, run_dir)
    part = replace(job.data, held_out=HeldOutConfig(share=0.1))
    cases = {
        "the same": (replace(job, evaluation=replace(job.evaluation, url=digits_url)), True),
        "beside a part of it": (replace(job, data=part), False),
        "none": (job, False),
    }
    for name, (changed, is_warned) in cases.items():
        caplog.clear()
        prepare(changed, one_world(0, 1))
        assert ("is what the run trains on, so its accuracy says nothing" in caplog.text) == is_warned, name


@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param({"run_dir": ""}, "--run-dir is missing", id="nowhere to write"),
        pytest.param({"data": replace(digits_smoke().data, url="")}, "--data.url is missing", id="no data"),
        pytest.param({"global_batch": 12}, "not a multiple of --data.lanes", id="a batch that lanes do not divide"),
        pytest.param({"initial": InitialConfig(weights="gone")}, "gone", id="weights that are not there"),
    ],
)
def test_what_does_not_fit_is_refused(digits_url: str, run_dir: Path, change: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        prepare(replace(job_of(digits_url, run_dir), **change), one_world())  # type: ignore[arg-type]


def test_more_ranks_than_lanes_are_refused_until_a_run_has_begun(
    digits_url: str, run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = job_of(digits_url, run_dir)
    with pytest.raises(UserError, match=r"--data\.lanes is 8, fewer than the 16 ranks"):
        prepare(job, one_world(0, 16))
    assert not caplog.text
    checkpoint = run_dir / "checkpoints" / CheckpointId(step=1, attempt="1-0").folder
    checkpoint.mkdir(parents=True)
    (checkpoint / MANIFEST_NAME).touch()
    prepare(job, one_world(0, 16))
    assert "the run goes on, slower than it could: --data.lanes is 8, fewer than the 16 ranks" in caplog.text


def test_a_run_that_is_kept_stopped_is_refused(digits_url: str, run_dir: Path) -> None:
    run_dir.mkdir()
    (run_dir / "STOP").touch()
    with pytest.raises(UserError, match="STOP exists and keeps the run stopped; delete it to continue"):
        prepare(job_of(digits_url, run_dir), one_world())


def test_nearly_equal_classes_of_a_mix_are_said(
    tmp_path: Path, run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    urls = []
    for number, names in enumerate((("a", "b"), ("A", "b"))):
        root = tmp_path / f"images{number}"
        for place, name in enumerate(names):
            (root / name).mkdir(parents=True)
            for seed in range(8):
                (root / name / f"{seed}.png").write_bytes(image_bytes(100 * place + seed + 50 * number))
        urls.append(str(tmp_path / f"packed{number}"))
        assert run(PackJob(out=urls[-1], source=FolderSource(root=str(root)), samples_per_block=1)) == 0
    job = job_of("", run_dir)
    mixed = replace(job.data, mix=((urls[0], 1.0), (urls[1], 1.0)), lanes=8, window_blocks=1)
    with caplog.at_level(logging.WARNING):
        prepared = prepare(replace(job, data=mixed, global_batch=8), one_world())
    assert prepared.job.model.num_classes == 3
    assert "the mixed classes 'a', 'A' differ only in case, spaces or similar characters; are they one?" in caplog.text


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


@pytest.mark.parametrize(
    ("asked", "expected", "said"),
    [
        pytest.param(0, 10, [], id="left open"),
        pytest.param(10, 10, [], id="the same"),
        pytest.param(
            1000,
            1000,
            [
                "the data has 10 classes, the model 1000: 990 of its outputs never have an image; "
                "--model.num-classes 0 takes the data's"
            ],
            id="more than the data has",
        ),
    ],
)
def test_classes(digits_url: str, caplog: pytest.LogCaptureFixture, asked: int, expected: int, said: list[str]) -> None:
    recipe = digits_smoke()
    job = replace(recipe, data=replace(recipe.data, url=digits_url), model=replace(recipe.model, num_classes=asked))
    data, held_out = open_training_data(job.data), open_dataset(digits_url)
    with caplog.at_level(logging.WARNING):
        found, _ = decide_classes(job, data, [held_out], say=True)
        assert decide_classes(job, data, [held_out], say=False)[0] == found, "other ranks say nothing"
    assert found == replace(job, model=replace(job.model, num_classes=expected))
    assert [record.getMessage() for record in caplog.records] == said


def test_fewer_than_the_data_has_are_refused(digits_url: str) -> None:
    recipe = digits_smoke()
    job = replace(recipe, data=replace(recipe.data, url=digits_url), model=replace(recipe.model, num_classes=9))
    with pytest.raises(UserError, match=r"has 10 classes, the model has 9; set --model\.num-classes 10"):
        decide_classes(job, open_training_data(job.data), [], say=True)


def test_images_without_labels_are_refused_where_labels_are_needed(tmp_path: Path) -> None:
    """Captioned images in tars: masked patches are learnt from them, classes are not."""
    with tarfile.open(tmp_path / "0.tar", "w") as archive:
        for number in range(4):
            for suffix, member in {"png": image_bytes(number), "txt": b"a caption"}.items():
                info = tarfile.TarInfo(f"{number}.{suffix}")
                info.size = len(member)
                archive.addfile(info, io.BytesIO(member))
    index_tars(str(tmp_path), unlabeled="keep")
    recipe = digits_smoke()
    data, held_out = open_training_data(replace(recipe.data, url=str(tmp_path))), open_dataset(str(tmp_path))
    with pytest.raises(UserError, match="has no labels to train on; give a dataset that has, predict masked patches"):
        decide_classes(recipe, data, [], say=True)
    with pytest.raises(UserError, match="has no labels to score a model with"):
        label_map(held_out, ("cat",))
    masked = masked_patches_pixels()
    assert decide_classes(masked, data, [], say=True)[0] == masked


def test_a_patch_size_that_no_step_draws_is_a_warning(
    digits_url: str, run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = job_of(digits_url, run_dir)
    for sizes, is_warned in (((4, 16), True), ((4, 8), False), ((), False)):
        caplog.clear()
        prepare(replace(job, tokens=TokensConfig(patch_sizes=sizes)), one_world(0, 1))
        assert ("patches of 8 px, which no step draws (4, 16 px)" in caplog.text) == is_warned, sizes


def test_one_class_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(4):
        (tmp_path / "images/IMG").mkdir(parents=True, exist_ok=True)
        (tmp_path / f"images/IMG/{number}.png").write_bytes(image_bytes(number))
    pack.run(pack.PackJob(source=FolderSource(root=str(tmp_path / "images")), out=str(tmp_path / "data")))
    recipe = digits_smoke()
    data = open_training_data(replace(recipe.data, url=str(tmp_path / "data")))
    caplog.clear()
    decide_classes(recipe, data, [], say=True)
    assert caplog.messages == [
        f"{tmp_path}/data has only one class, 'IMG': there is nothing to tell it from, so a model learns nothing"
    ]


def test_uneven_classes_are_said_and_weighted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name, numbers in (("cat", range(10)), ("lynx", range(10, 12))):
        (tmp_path / "images" / name).mkdir(parents=True)
        for number in numbers:
            (tmp_path / f"images/{name}/{number}.png").write_bytes(image_bytes(number))
    pack.run(pack.PackJob(source=FolderSource(root=str(tmp_path / "images")), out=str(tmp_path / "data")))
    recipe = digits_smoke()
    data = open_training_data(replace(recipe.data, url=str(tmp_path / "data")))
    assert balanced_weights(data.class_shares, 2).tolist() == pytest.approx([12 / (2 * 10), 12 / (2 * 2)])
    with caplog.at_level(logging.INFO):
        caplog.clear()
        decide_classes(replace(recipe, class_weights="balanced"), data, [], say=True)
        decide_classes(recipe, data, [], say=False)
        assert not caplog.messages
        decide_classes(recipe, data, [], say=True)
    assert caplog.messages == [
        "the classes are uneven: 'cat' has 5 times the images of 'lynx'; --class-weights balanced weights them so that "
        "each class counts as much as any other"
    ]


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        pytest.param(tuple("0123456789"), "", id="the same"),
        pytest.param(tuple(f"unnamed {number}" for number in range(10)), "", id="a head without names"),
        pytest.param(
            tuple("012345678x"), r"calls class 9 'x', .* '9' \(1 differ\); give --initial\.new-head", id="others"
        ),
        pytest.param(tuple("0123"), r"has 4 classes, the model 10; give --initial\.new-head", id="fewer"),
    ],
)
def test_a_head_that_is_kept_is_of_the_datas_classes(
    digits_url: str, tmp_path: Path, labels: tuple[str, ...], message: str
) -> None:
    recipe = digits_smoke()
    model = replace(recipe.model, num_classes=len(labels))
    state = build_model(model).state_dict()
    save_weights(tmp_path, config=model, labels=labels, tensor=lambda name: state[name])
    job = replace(recipe, data=replace(recipe.data, url=digits_url), model=replace(recipe.model, num_classes=10))
    data = open_training_data(job.data)
    refuse_other_head(replace(job, initial=InitialConfig(weights=str(tmp_path))), data)
    kept = replace(job, initial=InitialConfig(weights=str(tmp_path), new_head=False))
    with pytest.raises(UserError, match=message) if message else nullcontext():
        refuse_other_head(kept, data)


def test_a_single_unused_output_is_counted_as_one() -> None:
    assert ": 1 of its outputs never has an image;" in unused_classes(9, 10)
