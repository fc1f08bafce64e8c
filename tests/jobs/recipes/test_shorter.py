"""Every recipe at its smoke size: the same run but for sizes, and it can be built; some really train on digits."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from jobs.recipes import finetune, pretrain
from jobs.recipes.shorter import smoke
from pipeline.checkpoints.attempts import list_committed
from pipeline.checkpoints.manifest import MANIFEST_NAME, manifest_from_json
from pipeline.checkpoints.rank_file_in import RankFiles
from pipeline.models import build_model
from pipeline.models.flops import num_parameters
from pipeline.models.loss import classification_loss
from pipeline.models.masked import masked_loss, masked_targets
from pipeline.training.reporting.metrics import read_metrics
from pipeline.training.settings.job import TrainingJob
from pipeline.training.summary import first_sigmoid_loss
from pipeline.training.zero.batch_plan import plan_batch
from shards.config import SubsetConfig
from shards.store import open_store
from tests.rigs.faults import differs, every_fault
from tests.rigs.processes import patchline
from tests.rigs.training import run

RECIPES = {**pretrain.RECIPES, **finetune.RECIPES}


@every_fault
def test_a_smoke_size_can_be_built_and_learns() -> Iterator[str]:
    """Each kind of model and loss once: of most recipes, the smoke sizes differ in their names alone. No tiny model has
    the name of a published one."""
    learned = set[str]()
    for name, recipe in RECIPES.items():
        job = smoke(recipe())
        config = job.model if job.model.masked_patches else replace(job.model, num_classes=10)
        plan_batch(job.global_batch, micro_batch=0, num_ranks=2, lanes=job.data.lanes, pairs=job.data.mixup.is_on)
        if config.name != f"{recipe().model.name}_smoke":
            yield f"the smoke size of {name} is called {config.name}"
        kind = f"{config.is_bit} {job.loss} {vars(config) | {'name': ''}}"
        if kind in learned:
            continue
        learned.add(kind)
        if num_parameters(config) >= 2_000_000:
            yield f"the smoke size of {name} has {num_parameters(config):,} parameters, allowed: below 2 million"
        model = build_model(config)
        images = torch.zeros(2, config.image_size, config.image_size, 3, dtype=torch.uint8)
        if config.masked_patches:
            loss = masked_loss(model(images), masked_targets(images, config), target=config.masked_target)
        else:
            loss = classification_loss(model(images), torch.tensor([[1], [2]]), name=job.loss)
        torch.autograd.backward(loss)
        if not torch.isfinite(loss):
            yield f"the first loss of {name} at its smoke size is {loss.item()}"
        gradient = model.head.weight.grad
        if gradient is None or not torch.count_nonzero(gradient):
            yield f"the head of {name} has no gradient at its smoke size"


SIZES = {"name", "image_size", "patch", "depth", "width", "mlp_width", "num_heads", "resnet_units", "resnet_factor"}


@every_fault
def test_a_smoke_size_is_the_same_run_but_for_sizes() -> Iterator[str]:
    kept = ("loss", "label_smoothing", "clip_norm", "optimizer", "ema_decay", "initial", "seed")
    for name, recipe in RECIPES.items():
        full = recipe()
        tiny = smoke(full)
        augment = replace(full.data.augment, resize_pixels=0)  # a size, too: that in proportion to the image
        subset = SubsetConfig()  # and this is of a large dataset
        lanes = (
            8 if augment.repeats == 1 else 4
        )  # with mixup, a batch of 32 has two images, each three times, of a lane
        expected = {field: getattr(full, field) for field in kept} | {
            "engine": replace(full.engine, precision="auto"),
            "data": replace(full.data, lanes=lanes, window_blocks=2, augment=augment, subset=subset),
            "schedule": replace(
                full.schedule,
                warmup_steps=min(4, full.schedule.warmup_steps),
                cooldown_steps=min(4, full.schedule.cooldown_steps),
            ),
            "steps": 12,
            "global_batch": 32,
        }
        for field, value in expected.items():
            yield from differs(f"the smoke size of {name}: {field}", getattr(tiny, field), value)
        for field in sorted(vars(full.model).keys() - SIZES):
            value = getattr(full.model, field)
            if field == "num_classes" and full.model.masked_target == "pixels":
                value = 3 * 8 * 8  # of a smaller patch
            yield from differs(f"the smoke size of {name}: model.{field}", getattr(tiny.model, field), value)


def test_fine_tuning_stays_at_a_higher_resolution() -> None:
    before, after = smoke(pretrain.RECIPES["vit_h14_jft"]()), smoke(finetune.RECIPES["imagenet_518_h14"]())
    assert (before.model.grid, after.model.grid) == ((4, 4), (6, 6))
    assert before.model.size == after.model.size


def test_the_command_line_knows_the_smoke_of_each_recipe() -> None:
    ended = patchline("pretrain", "vit_h14_jft_smoke", "--steps", "0")
    assert (ended.code, "steps" in ended.errors) == (2, True), ended.errors
    assert patchline("pretrain", "digit_smoke").code == 2
    assert patchline("pack", "digits_smoke").code == 2, "packing has no smoke size"


def train(words: list[str], log_dir: Path) -> None:
    assert run([*words, "--device", "cpu"], num_ranks=1, log_dir=log_dir) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("r50_vit_b32_jft", id="hybrid, JFT: sigmoid, linear decay, no clipping"),
        pytest.param("bit_r50x1_jft", id="BiT"),
        pytest.param("vit_b16_jft_relative", id="relative positions"),
        pytest.param("vit_b16_jft_2d_shared", id="2-D positions, the same at each layer"),
        pytest.param("vit_b16_axial_jft", id="axial attention", marks=pytest.mark.long),
        pytest.param("vit_b16_i21k_augreg", id="AugReg: mixup, RandAugment, decay that follows the schedule"),
    ],
)
def test_a_smoke_run(digits_url: str, tmp_path: Path, name: str) -> None:
    """The whole stage on real digits: the loss falls from where the recipe's head begins."""
    job: TrainingJob = smoke(RECIPES[name]())
    train(["pretrain", f"{name}_smoke", "--data.url", digits_url, "--run-dir", str(tmp_path / "run")], tmp_path)
    lines = read_metrics(tmp_path / "run")
    assert len(lines) == job.steps
    job = replace(job, model=replace(job.model, num_classes=10))
    assert lines[0]["loss"] == pytest.approx(first_sigmoid_loss(job, labels_per_image=1.0), rel=1e-5)
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert lines[0]["learning_rate"] == 0.0


@pytest.mark.long
@pytest.mark.slow
def test_basic_units_train_with_activation_checkpointing(digits_url: str, tmp_path: Path) -> None:
    """As the bottlenecks above: their own recipe's rate is too high for 12 steps."""
    words = ["pretrain", "bit_r50x1_jft_smoke", "--model.name", "bit_r18x1"]
    words += ["--engine.activation-checkpointing", "full"]
    train([*words, "--data.url", digits_url, "--run-dir", str(tmp_path / "run")], tmp_path)
    losses = [line["loss"] for line in read_metrics(tmp_path / "run")]
    assert losses[0] == pytest.approx(10.0, rel=1e-2)
    assert losses[-1] < losses[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=pytest.mark.long) for name in ("vit_b16_jft_2d_shared", "vit_b16_jft_1d_layers")),
        "vit_b16_jft_relative",
    ],
)
def test_positions_in_layers_are_sharded_like_all_else(digits_url: str, tmp_path: Path, name: str) -> None:
    """Two ranks that share the parameters (ZeRO-3) have the losses of one."""
    words = ["pretrain", f"{name}_smoke", "--data.url", digits_url, "--engine.precision=fp32", "--steps=6", "--run-dir"]
    train([*words, str(tmp_path / "one")], tmp_path)
    sharded = [*words, str(tmp_path / "two"), "--engine.zero-stage=3", "--device=cpu"]
    assert run(sharded, num_ranks=2, log_dir=tmp_path) == 0
    losses = [[line["loss"] for line in read_metrics(tmp_path / one)] for one in ("one", "two")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.slow
def test_the_papers_two_stages_as_smoke_runs(digits_url: str, tmp_path: Path) -> None:
    """vit_h14_jft, then imagenet_518_h14 from its weights: resampled positions, a new head, averaged weights."""
    words = ["--data.url", digits_url, "--run-dir"]
    train(["pretrain", "vit_h14_jft_smoke", *words, str(tmp_path / "pretrain")], tmp_path)
    initial = ["--initial.weights", str(tmp_path / "pretrain" / "weights")]
    train(["finetune", "imagenet_518_h14_smoke", *initial, *words, str(tmp_path / "finetune")], tmp_path)
    lines = read_metrics(tmp_path / "finetune")
    assert lines[0]["loss"] == pytest.approx(2.302585, rel=1e-4)  # a zero head over ten classes
    average, master = (saved_head(tmp_path / "finetune", slot=slot) for slot in ("average", "master"))
    weights = load_file(tmp_path / "finetune" / "weights" / "model.safetensors")["head.weight"]
    assert torch.equal(weights, average)
    assert torch.linalg.norm(average) < 0.01 * torch.linalg.norm(master), "0.9999 has hardly begun to follow"


def saved_head(run_dir: Path, *, slot: str) -> torch.Tensor:
    """The head's matrix in the newest checkpoint."""
    store = open_store(str(run_dir / "checkpoints"))
    newest = max(list_committed(store), key=lambda place: place.step)
    manifest = manifest_from_json(store.read(f"{newest.folder}/{MANIFEST_NAME}"))
    return RankFiles(store, manifest).tensor("head.weight", slot=slot)
