"""`patchline plan RECIPE` prints a table for every training recipe."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jobs.models.evaluate import EvaluateJob
from jobs.planning.plan import operations, rows_of
from jobs.recipes import deit3, finetune, pretrain
from jobs.record import write_record
from jobs.resolve import default_job
from pipeline.models.config import ModelConfig
from pipeline.planning.forecast import cost_of
from pipeline.planning.rates import PACKAGED
from pipeline.training.settings.tokens import TokensConfig
from tests.rigs.faults import differs, every_fault
from tests.rigs.processes import patchline

JOB = default_job("plan", "digits_smoke")


def test_the_table_of_the_papers_largest_model() -> None:
    ended = patchline("plan", "vit_h14_jft", "--days", "30")
    assert ended.code == 0, ended.errors
    for text in (
        "vit_h14 at 224 px",
        "JFT-300M: 303,000,000 images, 18,291 classes",
        "655,835,251 (25,070,451 of them in the head)",
        "334.6 GFLOP",
        "1.0039 TFLOP",
        "1,035,645 of 4,096 images",
        "14.00",
        "4,259 exaFLOPs",
        "1,637 images/s",
    ):
        assert text in ended.output, ended.output


def test_any_field_of_the_recipe_can_be_changed() -> None:
    words = ("--training.model.image-size", "384", "--training.steps", "20000", "--num-classes", "7")
    ended = patchline("plan", "imagenet_384", *words)
    assert ended.code == 0
    assert "1,281,167 images, 7 classes" in ended.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        pytest.param(("vit_h15_jft",), "unknown recipe 'vit_h15_jft' of patchline plan", id="no such recipe"),
        pytest.param(("vit_h14_jft", "--days", "0"), "--days is 0; allowed: above 0", id="no time"),
        pytest.param((), "usage: patchline plan RECIPE", id="no recipe"),
    ],
)
def test_mistakes(words: tuple[str, ...], message: str) -> None:
    ended = patchline("plan", *words)
    assert ended.code == 2
    assert message in " ".join(ended.errors.split())


@every_fault
def test_every_training_recipe_has_a_plan() -> Iterator[str]:
    training = {**pretrain.RECIPES, **finetune.RECIPES}
    for name, recipe in training.items():
        job = default_job("plan", name)
        cost = cost_of(job.training, num_images=job.num_images, num_classes=job.num_classes, days=job.days)
        rows = dict(rows_of(job, cost))
        yield from (f"the plan of {name} says nothing about: {row}" for row, text in rows.items() if not text)
        yield from differs(f"the recipe of the plan of {name}", job.recipe, name)
        yield from differs(f"the plan of {name}: training", job.training, recipe())
        if ("images not known" in rows["dataset"]) != name.startswith("photos"):
            yield f"the dataset of {name} is {rows['dataset']}; recipes of photographs alone have none of their own"


def test_what_is_not_known_is_asked_for() -> None:
    job = default_job("plan", "photos_smoke")
    rows = dict(rows_of(job, cost_of(job.training, num_images=0, num_classes=0, days=1)))
    assert rows["dataset"] == "yours: images not known (--num-images), classes not known (--num-classes)"
    assert rows["epochs"] == "not known (--num-images)"
    assert "without the head" in rows["parameters"]


def test_the_epochs_of_every_paper_recipe_are_whole() -> None:
    for name in pretrain.RECIPES:
        job = default_job("plan", name)
        if name in deit3.RECIPES:  # whose sampler makes whole batches of an epoch, 167 to 1,167 images short of it
            continue
        if name.endswith(("_jft", "_i21k", "_i1k", "ep", "augreg", "_sam")):
            cost = cost_of(job.training, num_images=job.num_images, num_classes=job.num_classes, days=1)
            assert cost.num_epochs == pytest.approx(round(cost.num_epochs or 0), abs=2e-3), name  # half a step of 312.8
            assert round(cost.num_epochs or 0) in (7, 14, 30, 90, 300)


@pytest.mark.parametrize(
    ("words", "epochs"),
    [
        pytest.param(("vit_b16_i21k",), "90.00", id="the recipe's own set"),
        pytest.param(
            ("vit_b16_i21k", "--num-images", "13151276"),
            "97.18 (the recipe's 90: --training.steps 288968)",
            id="the winter release: 90 x 13,151,276 / 4096 = 288,968.47",
        ),
        pytest.param(
            ("vit_b16_i21k_augreg", "--num-images", "14197122"),
            "298.98 (the recipe's 300: --training.steps 1039828)",
            id="all of the autumn release for AugReg: 300 x 14,197,122 / 4096 = 1,039,828.3",
        ),
        pytest.param(
            ("vit_b16_i21k", "--num-images", "13151276", "--training.steps", "1000"), "0.31", id="the user's own steps"
        ),
        pytest.param(("vtab_svhn", "--num-images", "2000"), "640.00", id="not in epochs, though they are whole"),
        pytest.param(("digits_smoke", "--num-images", "2000"), "19.20", id="not in epochs"),
    ],
)
def test_a_plan_for_a_set_of_another_size_names_the_steps(words: tuple[str, ...], epochs: str) -> None:
    ended = patchline("plan", *words)
    assert ended.code == 0, ended.errors
    row = next(line for line in ended.output.splitlines() if " epochs " in line)
    assert row.strip("│ ").removeprefix("epochs").strip("│ ") == epochs


def test_a_run_has_a_plan(tmp_path: Path) -> None:
    """From its job.yaml, in which the number of classes is known."""
    write_record(tmp_path, stage="finetune", job=finetune.RECIPES["imagenet_518_h14"]())
    ended = patchline("plan", str(tmp_path / "job.yaml"), "--num-classes", "1000", "--num-images", "1280000")
    assert ended.code == 0, ended.errors
    assert "633,470,440" in ended.output
    assert "8.00" in ended.output
    write_record(tmp_path / "scores", stage="evaluate", job=EvaluateJob())
    ended = patchline("plan", str(tmp_path / "scores/job.yaml"))
    assert (ended.code, "a record of the stage 'evaluate'; a plan is of pretrain or finetune" in ended.errors) == (
        2,
        True,
    )


@pytest.mark.parametrize(
    ("exaflops", "shown"),
    [
        (4259.4, "4,259 exaFLOPs"),
        (12.34, "12.3 exaFLOPs"),
        (0.0123, "0.0123 exaFLOPs"),
        (0.00034, "0.3400 petaFLOPs"),
        (2.4e-7, "0.2400 teraFLOPs"),
        (3.1e-11, "0.0310 gigaFLOPs"),
    ],
)
def test_small_runs_have_a_smaller_unit(exaflops: float, shown: str) -> None:
    assert operations(exaflops) == shown


def test_a_smoke_recipe_costs_something() -> None:
    rows = dict(rows_of(JOB, cost_of(JOB.training, num_images=1438, num_classes=10, days=1)))
    assert "petaFLOPs" in rows["the whole run"]
    assert not rows["the whole run"].startswith("0.0000")
    assert rows["forward, per image"] == "28.1 MFLOP"
    assert rows["training, per image"] == "0.0844 GFLOP (three forward passes)"
    assert rows["for 7 days"] == "0.444 images/s, 0.0375 GFLOP/s"


def test_the_plan_on_gpus() -> None:
    ended = patchline("plan", "vit_h14_jft", "--gpu", "h100", "--num-gpus", "8")
    assert ended.code == 0, ended.errors
    shown = " ".join(ended.output.replace("│", " ").split())
    for text in (
        "on 8 x h100 84.9 GB of memory on each",
        "weights 1.31 GB",
        "fp32 masters 0.33 GB",
        "activations 43.94 GB",
        "micro-batch 128 x 4 passes x 8 ranks",
        "2,191 images/s at 27.8% of nominal operations",
        "nobody has measured this step of vit_h14 on h100; 28% of nominal operations is NVIDIA's figure",
        "1.87 s: 99.3% computes at 28% of nominal operations, 0.0% waits for the host, 0.7% for exchanges",
        "38.9 to 117 ms to launch a pass; with fewer than 11 to 33 images a GPU waits for it, which is on more than "
        "127 to 382 GPUs.",
        "At a batch of 4,096, at least half of a step computes on up to 256 GPUs.",
        "22.41 days",
        "checkpoint 7.9 GB, 0.98 GB per rank",
        "stall 0.049 s",
    ):
        assert text in shown, ended.output
    found = json.loads(patchline("plan", "vit_h14_jft", "--gpu", "h200", "--num-gpus", "16", "--json").output)
    assert found["forecast"]["fit"]["plan"]["micro_batch"] == 256
    shared = patchline("plan", "vit_b16_i1k", "--gpu", "h100", "--num-gpus", "128").output
    said = "a run does not begin so: --training.data.lanes is 64, fewer than the 128 ranks, which would"
    assert said in " ".join(shared.replace("│", " ").split())
    alone = patchline("plan", "digits_smoke", "--gpu", "h100", "--num-gpus", "1").output
    assert "on any number of GPUs; on 1, take a larger batch" in " ".join(alone.replace("│", " ").split())
    assert "times an epoch" not in ended.output
    many = patchline("plan", "vit_h14_jft", "--gpu", "h100", "--num-gpus", "4096", "--network-gbits", "1")
    shown = " ".join(many.output.replace("│", " ").split())
    assert "GPUs; take fewer." in shown
    assert found["cost"]["num_parameters"] == 655_835_251


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            {"name": "vit_h14"},
            "257 fill 3 tiles of 128 in a GPU's attention, 256 would fill 2: --training.model.",
        ),
        ({"name": "vit_l16", "image_size": 256}, "257 fill 3 tiles"),
        ({"name": "vit_h14", "pooling": "average"}, ""),
        ({"name": "vit_h14", "registers": 4}, ""),
        ({"name": "vit_l16"}, ""),
        ({"name": "bit_r50x1"}, ""),
    ],
)
def test_a_class_token_that_fills_one_more_tile_is_named(changed: dict[str, Any], said: str) -> None:
    model = ModelConfig(**{"image_size": 224, "num_classes": 10} | changed)
    job = replace(JOB, gpu="h200", training=replace(JOB.training, model=model))
    rows = dict(rows_of(job, cost_of(job.training, num_images=9, num_classes=10, days=7)))
    assert rows.get("tokens", "").startswith(said)
    assert bool(rows.get("tokens")) is bool(said)
    alone = replace(job, gpu="")
    assert "tokens" not in dict(rows_of(alone, cost_of(job.training, num_images=9, num_classes=10, days=7)))


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        (
            TokensConfig(patch_dropout=0.5),
            "up to step 10,000: 224 px, 98 of 196 patches: 0.50 times the operations of whole images",
        ),
        (
            TokensConfig(patch_dropout=0.5, whole_steps=1000),
            "up to step 9,000: 224 px, 98 of 196 patches; up to step 10,000: 224 px, 196 of 196 patches: 0.55 times",
        ),
        (
            TokensConfig(image_sizes=(160,), size_steps=(8000,)),
            "up to step 8,000: 160 px, 100 of 100 patches; up to step 10,000: 224 px, 196 of 196 patches: 0.60 times",
        ),
        (
            TokensConfig(patch_sizes=(16, 28, 32)),
            "each step draws patches of 16, 28 or 32 px; up to step 10,000: 224 px, 196 of 196, 64 of 64 or 49 of 49 "
            "patches: 0.53 times the operations of whole images in patches of 16 px",
        ),
        (
            TokensConfig(patch_sizes=(8, 16, 32)),
            "each step draws patches of 8, 16 or 32 px; up to step 10,000: 224 px, 784 of 784, 196 of 196 or 49 of 49 "
            "patches: 1.90 times the operations of whole images in patches of 16 px",
        ),
    ],
)
def test_tokens_while_training_and_what_they_cost(tokens: TokensConfig, said: str) -> None:
    model = ModelConfig(name="vit_b16", image_size=224)
    job = replace(JOB, training=replace(JOB.training, model=model, steps=10_000, tokens=tokens))
    cost = cost_of(job.training, num_images=9, num_classes=1000, days=7)
    rows = dict(rows_of(job, cost))
    assert rows["tokens while training"].startswith(said)
    assert cost.total_exaflops == pytest.approx(cost.train_flops * 10_000 * job.training.global_batch / 1e18)
    without = replace(job.training, tokens=TokensConfig())
    assert "tokens while training" not in dict(rows_of(replace(job, training=without), cost))


def test_a_recipe_without_a_class_token_is_named_where_there_is_one() -> None:
    shown = " ".join(patchline("plan", "vit_h14_jft", "--gpu", "h200").output.replace("│", " ").split())
    said = (
        "256 would fill 2: the recipe vit_h14_jft_average has no class token, a linear classifier and a learning rate "
    )
    assert f"{said}of 0.0003" in shown
    assert default_job("plan", "vit_h14_jft_average").training.schedule.learning_rate == 3e-4


@pytest.mark.parametrize("how", ["off", "selective", "full"])
def test_what_recomputation_costs_is_said(how: str) -> None:
    words = ("--gpu", "h200", "--num-gpus", "16", "--training.engine.activation-checkpointing", how)
    shown = " ".join(patchline("plan", "vit_h14_jft", *words).output.replace("│", " ").split())
    assert f"recomputed {how} (--training.engine.activation-checkpointing); activations take" in shown
    assert "with selective, about 1% slower by the lowering for an H200, which the rate leaves out;" in shown
    assert "GB with full, at 1.33 times the operations" in shown


def test_a_plan_on_a_gpu_that_was_measured() -> None:
    ended = patchline("plan", "vit_h14_jft", "--gpu", "h200", "--num-gpus", "1")
    assert ended.code == 0, ended.errors
    shown = " ".join(ended.output.replace("│", " ").split())
    for text in (
        "435 images/s (429 to 438) at 44.2% of nominal operations",
        "source vit_h14 compiled, attention cudnn, 256 images a pass, measured on NVIDIA H200 (torch 2.11.0+cu130): "
        "Patchline's h200",
        "112.78 days (112.08 to 114.51 days)",
    ):
        assert text in shown, ended.output
    assert "nobody has measured" not in shown
    found = json.loads(patchline("plan", "vit_h14_jft", "--gpu", "h200", "--num-gpus", "256", "--json").output)
    rates = [found["forecast"][f"{name}images_per_second"] for name in ("least_", "", "most_")]
    assert rates == sorted(rates)
    assert rates[0] < 0.5 * rates[1], "a host that takes as long as was measured on one limits 16 images"
    many = patchline("plan", "vit_h14_jft", "--gpu", "h200", "--num-gpus", "64").output
    said = "nobody has measured 64 images a pass; exchanges between ranks are a forecast, which nobody has measured"
    assert said in " ".join(many.replace("│", " ").split())


def test_a_plan_by_the_users_own_measurement(tmp_path: Path) -> None:
    found = json.loads((PACKAGED / "h200.json").read_text())
    found["about"]["name"] = "NVIDIA H100 80GB HBM3"
    file = tmp_path / "own.json"
    file.write_text(json.dumps(found))
    words = ("plan", "vit_h14_jft", "--gpu", "h100", "--num-gpus", "1", "--measured", str(file))
    ended = patchline(*words)
    assert ended.code == 0, ended.errors
    shown = " ".join(ended.output.replace("│", " ").split())
    assert "435 images/s (377 to 438) at 44.2% of nominal operations" in shown, "with 128 images a pass, not 256"
    assert "measured on NVIDIA H100 80GB HBM3 (torch 2.11.0+cu130): " in shown
    other = patchline("plan", "vit_h14_jft", "--gpu", "h200", "--measured", str(file))
    said = f"--measured is '{file}', with --gpu h200, but it is from NVIDIA H100 80GB HBM3"
    assert (other.code, said in " ".join(other.errors.split())) == (2, True), other.errors
    file.write_text("[]")
    ended = patchline(*words)
    assert ended.code == 2
    assert f"--measured is '{file}', which no plan can use: it has no parts" in " ".join(ended.errors.split())


def test_a_small_model_on_gpus_is_not_shown_as_nothing() -> None:
    ended = patchline("plan", "digits_smoke", "--gpu", "h100")
    assert ended.code == 0, ended.errors
    shown = " ".join(ended.output.replace("│", " ").split())
    assert not re.search(r"\b0\.0+ (GB|s|days)", shown), ended.output
    for text in ("weights 1.6 MB", "checkpoint 9.9 MB, 1.2 MB per rank", "stall less than 1 ms"):
        assert text in shown, ended.output
    assert re.search(r"predicted time \d+\.\d s", shown), ended.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        pytest.param(
            ("--gpu", "h100", "--training.micro-batch", "100"),
            "--training.micro-batch is 100, which does not divide a rank's share of 512 images",
            id="the flag has its name here",
        ),
        pytest.param(("--gpu", "v100"), "--gpu is 'v100'; known: a100-40, a100, h100, h200, b200, l40s", id="unknown"),
        pytest.param(("--gpu", "h100", "--num-gpus", "24"), "4096, not divisible by 24 ranks; start 8 or 16", id="24"),
        pytest.param(("--gpu", "h100", "--num-gpus", "0"), "--num-gpus is 0; allowed: 1 or more", id="none"),
        pytest.param(("--gpu", "h100", "--mfu", "2"), "--mfu is 2", id="faster than its nominal speed"),
        pytest.param(("--gpu", "h100", "--measured", "a.json", "--mfu", "0.5"), "--measured a.json says", id="both"),
        pytest.param(("--measured", "a.json"), "--measured a.json says nothing without --gpu", id="measured, no GPU"),
        pytest.param(("--network-gbits", "200"), "--network-gbits 200.0 says nothing without --gpu", id="no GPUs"),
        pytest.param(("--num-gpus", "16"), "--num-gpus 16 says nothing without --gpu; add --gpu h100", id="no GPU"),
    ],
)
def test_mistakes_about_gpus(words: tuple[str, ...], message: str) -> None:
    ended = patchline("plan", "vit_h14_jft", *words)
    assert ended.code == 2
    assert message in " ".join(ended.errors.split())
    assert "Traceback" not in ended.errors
