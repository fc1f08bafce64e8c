"""Jobs that fit what they name: the weights, the dataset, the batch, the run's folder and its length."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from jobs.arguments import values_of
from jobs.cli import _overridden
from jobs.fitted import with_warmup
from jobs.flags import flags_of
from jobs.models.evaluate import EvaluateJob
from jobs.recipes.finetune import cifar10_48
from jobs.recipes.photos import photos, photos_scratch_s16, steps_for
from jobs.recipes.pretrain import digits_smoke
from jobs.recipes.shorter import scaled, shortened
from jobs.record import write_record
from jobs.resolve import default_job
from jobs.settings.runs import VerifyResumeJob
from pipeline.models import ModelConfig, build_model
from pipeline.models.conversion.config import Format
from pipeline.models.conversion.convert import save_as
from pipeline.models.conversion.open_any import open_for_use
from pipeline.models.masked import output_names
from pipeline.models.weights.fit import fit_weights
from pipeline.models.weights.usage import DEFAULT_USAGE, Usage
from pipeline.shared_settings import EvaluationTransform
from pipeline.training.settings.job import TrainingJob
from pipeline.training.settings.schedule import ScheduleConfig
from shards.dataset import open_dataset
from shards.errors import UserError
from shards.store import open_store
from tests.rigs.datasets import packed_folders
from tests.rigs.processes import patchline
from tests.rigs.training import TINY

CONFIG = ModelConfig(
    name="vit", image_size=32, patch=16, depth=1, width=8, mlp_width=8, num_heads=2, num_classes=5, gelu="exact"
)
RECIPE = digits_smoke()  # 30 of 300 steps
CONSTANT = replace(RECIPE, schedule=ScheduleConfig(decay="constant", warmup_steps=30))
FLAGS = list(flags_of(RECIPE))
NOTE = "warm-up scaled from 30 to {} steps: the run has {} of the recipe's 300 steps"


def weights(
    folder: Path,
    config: ModelConfig = CONFIG,
    *,
    written: Format = "timm",
    transform: EvaluationTransform = DEFAULT_USAGE.transform,
) -> str:
    state, usage = build_model(config).state_dict(), Usage(transform=transform)
    save_as(written, folder, config=config, labels=("",) * 5, tensor=lambda name: state[name], usage=usage)
    return str(folder)


def job_of(recipe: str, default: TrainingJob, *words: str) -> TrainingJob:
    job: TrainingJob = _overridden(default, list(words), ("finetune", recipe))
    return job


def test_the_model_is_that_of_the_weights_and_flags_win(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    job = job_of("photos", photos(), "--initial.weights", weights(tmp_path / "timm"))
    assert job.model == replace(CONFIG, num_classes=0)
    larger = job_of("photos", photos(), "--initial.weights", weights(tmp_path / "timm"), "--model.image-size", "48")
    assert larger.model == replace(CONFIG, num_classes=0, image_size=48)
    assert "the model is that of the weights: vit at 48 px instead of 32" in caplog.text
    with pytest.raises(UserError, match=r"--model.image-size is 40, .* patch .* is 16 px: take 32 or 48"):
        job_of("photos", photos(), "--initial.weights", weights(tmp_path / "timm"), "--model.image-size", "40")


def test_what_the_weights_leave_open_is_said_and_can_be_imported_otherwise(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bare = weights(tmp_path / "w.npz", written="vision_transformer")
    caplog.set_level("INFO")
    job = job_of("photos", photos(), "--initial.weights", bare, "--model.gelu", "exact")
    assumed = "assumed, as the file does not say: gelu tanh, layer_norm_epsilon 1e-06 (others: patchline import)"
    assert assumed in caplog.text
    todo = r"since the file does not say it; give --model.gelu tanh, or import .* --gelu exact"
    model = replace(job.model, num_classes=5)
    with pytest.raises(UserError, match=todo):
        fit_weights(open_for_use(bare), model, initial=build_model(model).state_dict().__getitem__, new_head=True)


def test_images_are_scored_as_the_weights_say_or_with_antialiasing(tmp_path: Path) -> None:
    plain = job_of("photos", photos(), "--initial.weights", weights(tmp_path / "run", written="patchline"))
    assert plain.evaluation.transform == EvaluationTransform(antialias=True)
    said = EvaluationTransform(mode="central_crop", filter="bicubic", short_side=40)
    own = weights(tmp_path / "timm", transform=said)
    assert job_of("photos", photos(), "--initial.weights", own).evaluation.transform == said
    words = ("--initial.weights", own, "--model.image-size", "64", "--evaluation.transform.filter", "area")
    expected = replace(said, short_side=80, filter="area")
    assert job_of("photos", photos(), *words).evaluation.transform == expected


def test_another_patch_size_takes_an_image_size_of_its_own(tmp_path: Path) -> None:
    """--initial.patch resize: 40 px are whole patches of 8 px, though not of the weights' 16."""
    words = ["--initial.weights", weights(tmp_path / "timm"), "--initial.patch", "resize", "--model.patch", "8"]
    job = job_of("photos", photos(), *words, "--model.image-size", "40")
    assert job.model == replace(CONFIG, num_classes=0, patch=8, image_size=40)


def test_weights_of_masked_patches_give_a_classifier(tmp_path: Path) -> None:
    masked = replace(CONFIG, masked_patches=True, masked_target="pixels", masked_share=0.25, num_classes=768)
    state = build_model(masked).state_dict()
    save_as("patchline", tmp_path, config=masked, labels=output_names(masked), tensor=lambda name: state[name])
    job = job_of("photos", photos(), "--initial.weights", str(tmp_path))
    assert job.model == replace(CONFIG, num_classes=0)


def test_steps_and_scores_follow_the_dataset(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    url = str(packed_folders(tmp_path))
    caplog.set_level("INFO")
    job = job_of("photos", photos(), "--data.url", url)
    assert (job.steps, job.schedule.warmup_steps, job.evaluation.every_steps, job.evaluation.url) == (100, 10, 10, "")
    assert "100 steps of 64 images" in caplog.text
    packed_folders(tmp_path / "other").rename(f"{url}-test")
    assert job_of("photos", photos(), "--data.url", url).evaluation.url == f"{url}-test"
    assert job_of("photos", photos(), "--data.url", url, "--evaluation.url", "x").evaluation.url == "x"
    assert job_of("photos", photos(), "--data.url", url, "--data.held-out.share", ".1").evaluation.url == ""
    job = job_of("photos", photos(), "--data.url", url, "--steps", "40", "--global-batch", "32")
    assert (job.steps, job.schedule.warmup_steps) == (40, 4)
    assert job.schedule.learning_rate == pytest.approx(0.03 * 32 / 512)
    assert job_of("photos_scratch_s16", photos_scratch_s16(), "--data.url", url).steps == 1000


def test_a_test_set_on_s3_is_found_too(tmp_path: Path, s3_bucket: str) -> None:
    folder, url = packed_folders(tmp_path), f"s3://{s3_bucket}/photos"
    for path in (one for one in folder.rglob("*") if one.is_file()):
        open_store(url).write(str(path.relative_to(folder)), path.read_bytes())
    assert job_of("photos", photos(), "--data.url", url).evaluation.url == ""
    open_store(f"{url}-test").write("manifest.json", (folder / "manifest.json").read_bytes())
    assert job_of("photos", photos(), "--data.url", url).evaluation.url == f"{url}-test"


def test_a_few_images_are_enough(tmp_path: Path) -> None:
    """Fewer than lanes, a word that a beginner need not meet."""
    url = str(packed_folders(tmp_path))
    num_images = open_dataset(url).num_samples
    job = job_of("photos", photos(), "--data.url", url)
    assert num_images < photos().data.lanes
    assert 1 <= job.data.lanes <= num_images
    assert job.global_batch % job.data.lanes == 0
    assert job_of("photos", photos(), "--data.url", url, "--data.lanes", "64").data.lanes == 64


@pytest.mark.parametrize(
    ("recipe", "num_images", "steps"),
    [("photos", 10, 100), ("photos", 32_000, 10_000), ("photos", 10**7, 20_000), ("photos_scratch_b16", 6_400, 30_000)],
)
def test_steps_of_a_dataset(recipe: str, num_images: int, steps: int) -> None:
    assert steps_for(recipe, num_images=num_images, global_batch=64) == steps


def test_a_run_is_continued_as_it_was_recorded(tmp_path: Path) -> None:
    recorded = replace(photos(), model=replace(CONFIG, num_classes=0), steps=77, run_dir=str(tmp_path))
    write_record(tmp_path, stage="finetune", job=recorded)
    words = ("--run-dir", str(tmp_path), "--initial.weights", "gone", "--data.url", "gone")
    job = job_of("photos", photos(), *words)
    assert (job.model, job.steps) == (recorded.model, 77)


def test_a_trial_of_resuming_stays_one(tmp_path: Path) -> None:
    write_record(tmp_path, stage="finetune", job=photos())
    trial = default_job("verify-resume", "photos")
    words = ["--run-dir", str(tmp_path), "--data.url", "d"]
    assert isinstance(_overridden(trial, words, ("verify-resume", "photos")), VerifyResumeJob)


def test_lanes_follow_the_batch_and_the_shuffle_reaches_as_far(caplog: pytest.LogCaptureFixture) -> None:
    recipe = cifar10_48()
    assert recipe.data.lanes == 32
    caplog.set_level("INFO")
    job = job_of("cifar10_48", recipe, "--global-batch", "24")
    assert (job.data.lanes, job.data.window_blocks) == (8, 4 * recipe.data.window_blocks)
    assert "8 lanes instead of 32, which do not divide a batch of 24" in caplog.text
    assert job_of("cifar10_48", recipe, "--global-batch", "64").data == recipe.data
    assert job_of("cifar10_48", recipe, "--global-batch", "24", "--data.lanes", "12").data.lanes == 12


def test_the_folder_that_holds_a_record_is_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Moved, copied, seen from another working directory, or by a link: never a new run where the old one was."""
    caplog.set_level("INFO")
    monkeypatch.chdir(tmp_path)
    recorded = replace(photos(), run_dir="runs/old")
    write_record(Path("runs/old"), stage="finetune", job=recorded)
    assert job_of("runs/old/job.yaml", recorded).run_dir == "runs/old"
    assert not caplog.messages
    Path("moved run").symlink_to("runs/old")
    assert job_of("moved run/job.yaml", recorded).run_dir == "runs/old", "the same folder"

    Path("runs/old").rename("new")
    link = Path("link.yaml")
    link.symlink_to("new/job.yaml")
    for word in ("new/job.yaml", "new", "link.yaml", str(tmp_path / "new/job.yaml")):
        caplog.clear()
        assert Path(job_of(word, recorded).run_dir).resolve() == tmp_path / "new"
        assert "which holds this record; the record calls it runs/old" in caplog.text
    assert job_of("new/job.yaml", recorded, "--run-dir", "runs/other").run_dir == "runs/other"
    Path("mine.yaml").write_text(Path("new/job.yaml").read_text())
    assert job_of("mine.yaml", recorded).run_dir == "runs/old", "a file of the user's, with a name of its own"


@pytest.mark.parametrize(
    ("steps", "warmup"), [(1, 0), (3, 0), (6, 1), (14, 1), (16, 2), (150, 15), (299, 30), (300, 30), (9000, 30)]
)
def test_the_share_of_the_run_is_the_recipes_and_never_longer(steps: int, warmup: int) -> None:
    job, note = scaled(RECIPE, steps=steps, keep="")
    assert job == replace(RECIPE, schedule=replace(RECIPE.schedule, warmup_steps=warmup))
    assert bool(note) == (warmup != 30)


@pytest.mark.parametrize(
    ("words", "warmup", "note"),
    [
        pytest.param(["--steps", "3"], 0, NOTE.format(0, 3), id="too short for the recipe's own"),
        pytest.param(["--steps", "6"], 1, NOTE.format(1, 6).replace("1 steps", "1 step"), id="one step of it"),
        pytest.param(["--steps=150"], 15, NOTE.format(15, 150), id="in one word"),
        pytest.param(["--seed", "1", "--steps", "9", "--steps", "60"], 6, NOTE.format(6, 60), id="the last counts"),
        pytest.param(["--steps", "3", "--schedule.warmup-steps", "2"], 30, "", id="the user's own"),
        pytest.param(["--schedule.warmup_steps=2", "--steps", "3"], 30, "", id="with an underscore"),
        pytest.param(["--steps", "600"], 30, "", id="longer"),
        pytest.param(["--steps", "300"], 30, "", id="the recipe's length"),
        pytest.param(["--checkpoint.every-steps", "3"], 30, "", id="another flag"),
        pytest.param([], 30, "", id="nothing"),
    ],
)
def test_words(words: list[str], warmup: int, note: str) -> None:
    job, said = with_warmup("pretrain", RECIPE, values_of(words, FLAGS, command=("", "")))
    assert (job.schedule.warmup_steps, said.partition(" (")[0]) == (warmup, note)
    assert job.steps == 300, "the words' own to change"


def test_the_note_names_the_way_back_only_where_there_is_one() -> None:
    assert with_warmup("pretrain", RECIPE, {"--steps": 60})[1].endswith(" (--schedule.warmup-steps 30 keeps it)")
    assert with_warmup("pretrain", RECIPE, {"--steps": 30})[1].endswith(" steps"), "30 of 30 would be refused"
    assert with_warmup("pretrain", CONSTANT, {"--steps": 30})[1].endswith(" keeps it)")


def test_other_jobs_stay_as_they_are() -> None:
    assert with_warmup("evaluate", EvaluateJob(), {"--steps": 3}) == (EvaluateJob(), "")


@pytest.mark.parametrize(
    ("recorded", "more", "warmup"),
    [
        pytest.param("stage: pretrain\njob: {schedule: {warmup_steps: 10}}", [], 10, id="shorter when it began"),
        pytest.param(
            "stage: pretrain\njob: {schedule: {warmup_steps: 10}}",
            ["--schedule.warmup-steps", "5"],
            30,
            id="the user's own, which the run refuses",
        ),
        pytest.param("stage: pretrain\njob: {schedule: {warmup_steps: 400}}", [], 30, id="longer than the recipe"),
        pytest.param("stage: pretrain\njob: {schedule: {}}", [], 30, id="a record without it"),
        pytest.param("job: [", [], 30, id="no YAML"),
        pytest.param("job: {schedule: {warmup_steps: [10]}}", [], 30, id="a list for a number"),
        pytest.param(f"job: {{schedule: {{warmup_steps: {'9' * 5000}}}}}", [], 30, id="an endless number"),
        pytest.param("a: &a [*a]\njob: {schedule: {warmup_steps: 10}}", [], 30, id="a list in itself"),
        pytest.param(None, [], 30, id="no record"),
    ],
)
def test_a_run_that_is_extended_keeps_its_warmup(
    tmp_path: Path, recorded: str | None, more: list[str], warmup: int
) -> None:
    if recorded is not None:
        (tmp_path / "job.yaml").write_text(recorded)
    words = ["--steps", "200", "--run-dir", str(tmp_path), *more]
    job, note = with_warmup("pretrain", RECIPE, values_of(words, FLAGS, command=("", "")), extends=True)
    assert job.schedule.warmup_steps == warmup
    said = f"warm-up {warmup} steps, as the run in {tmp_path} began (the recipe: 30)"
    assert note == ("" if warmup == 30 else said)
    by_file = with_warmup(
        "pretrain", replace(RECIPE, run_dir=str(tmp_path)), values_of(more, FLAGS, command=("", "")), extends=True
    )
    assert (by_file[0].schedule, by_file[1]) == (job.schedule, note), "and where a YAML job names the directory"


@pytest.mark.parametrize(
    ("recorded_steps", "warmup"),
    [pytest.param(60, 9, id="the same length"), pytest.param(50, 6, id="another, which the run refuses")],
)
def test_the_same_command_keeps_the_warmup_that_its_run_has(tmp_path: Path, recorded_steps: int, warmup: int) -> None:
    """If the run was extended, or started by an older version."""
    record = f"stage: pretrain\njob: {{steps: {recorded_steps}, schedule: {{warmup_steps: 9}}}}"
    (tmp_path / "job.yaml").write_text(record)
    job, _ = with_warmup("pretrain", RECIPE, {"--steps": 60, "--run-dir": str(tmp_path)})
    assert job.schedule.warmup_steps == warmup


@pytest.mark.parametrize(
    ("steps", "short"), [(300, (300, 30, 100)), (400, (300, 30, 100)), (20, (20, 2, 7)), (1, (1, 0, 0))]
)
def test_the_first_steps_have_a_cooldown_in_proportion(steps: int, short: tuple[int, int, int]) -> None:
    job = shortened(replace(RECIPE, schedule=replace(RECIPE.schedule, cooldown_steps=100)), steps=steps)
    assert (job.steps, job.schedule.warmup_steps, job.schedule.cooldown_steps) == short


def test_a_short_command_warms_up_in_proportion_and_says_so(digits_url: str, tmp_path: Path) -> None:
    without = [word for pair in zip(TINY[::2], TINY[1::2], strict=True) for word in pair if "warmup" not in pair[0]]
    words = [*without, "--steps", "3", "--data.url", digits_url, "--run-dir", str(tmp_path / "run")]
    ended = patchline("pretrain", "digits_smoke", *words, "--model.num-classes", "12")
    assert ended.code == 0, ended.errors
    assert ended.errors.count(NOTE.format(0, 3)) == 1
    job = yaml.safe_load((tmp_path / "run" / "job.yaml").read_text())["job"]
    assert (job["steps"], job["schedule"]["warmup_steps"]) == (3, 0)
    said = "the data has 10 classes, the model 12: 2 of its outputs never have an image"
    assert ended.errors.count(said) == 1
    assert ended.errors.index(said) < ended.errors.index("from scratch"), "before the first step"


def test_a_plan_of_fewer_steps_needs_no_word_about_the_warmup() -> None:
    ended = patchline("plan", "digits_smoke", "--training.steps", "3")
    assert ended.code == 0, ended.errors
    assert "3 of 128 images" in ended.output


def test_both_stated_are_refused_as_they_stand() -> None:
    ended = patchline("pretrain", "digits_smoke", "--steps", "3", "--schedule.warmup-steps", "30")
    assert ended.code == 2
    assert "schedule.warmup_steps is 30, not below the 3 steps" in ended.errors
