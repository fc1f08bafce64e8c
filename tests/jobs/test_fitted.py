"""What the recipes for photographs take from weights and data, and lanes that fit a batch."""

from dataclasses import replace
from pathlib import Path

import pytest

from jobs.cli import _overridden
from jobs.recipes.finetune import cifar10_48
from jobs.recipes.photos import photos, photos_scratch_s16, steps_for
from jobs.record import write_record
from jobs.resolve import default_job
from jobs.settings.models import VerifyResumeJob
from pipeline.models import ModelConfig, build_model
from pipeline.models.conversion.config import Format
from pipeline.models.conversion.convert import save_as
from pipeline.models.conversion.open_any import open_for_use
from pipeline.models.masked import output_names
from pipeline.models.weights.fit import fit_weights
from pipeline.models.weights.usage import DEFAULT_USAGE, Usage
from pipeline.shared_settings import EvaluationTransform
from pipeline.training.settings.job import TrainingJob
from shards.dataset import open_dataset
from shards.errors import UserError
from shards.store import open_store
from tests.rigs.datasets import packed_folders

CONFIG = ModelConfig(
    name="vit", image_size=32, patch=16, depth=1, width=8, mlp_width=8, num_heads=2, num_classes=5, gelu="exact"
)


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
    job: TrainingJob = _overridden(default, list(words), f"patchline finetune {recipe}")
    return job


def test_the_model_is_that_of_the_weights_and_flags_win(tmp_path: Path) -> None:
    job = job_of("photos", photos(), "--initial.weights", weights(tmp_path / "timm"))
    assert job.model == replace(CONFIG, num_classes=0)
    larger = job_of("photos", photos(), "--initial.weights", weights(tmp_path / "timm"), "--model.image-size", "48")
    assert larger.model == replace(CONFIG, num_classes=0, image_size=48)
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
    assert isinstance(_overridden(trial, words, "patchline verify-resume photos"), VerifyResumeJob)


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
