"""A student learns what its teacher says of the same mixed crops, on any topology, and only from that teacher."""

import json
import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from scipy.special import log_softmax

from jobs import exit_codes
from jobs.recipes.pretrain import digits_smoke
from jobs.record import read_record
from jobs.reports.points import point_of
from pipeline.data.batches import Batch
from pipeline.data.config import DataConfig
from pipeline.data.stream import train_batches
from pipeline.evaluation.config import EvaluationConfig
from pipeline.models import ModelConfig, ViT, build_model
from pipeline.models.build import shapes_of
from pipeline.models.conversion.timm import save_timm
from pipeline.models.flops import forward_flops, num_parameters
from pipeline.models.weights.folder import filled_model, open_weights, save_weights
from pipeline.planning.forecast import cost_of, forecast
from pipeline.planning.rates import Rates
from pipeline.planning.step_time import flops_at
from pipeline.training.fitting.fit import fitted
from pipeline.training.gradients import Gradients
from pipeline.training.prepare import prepare
from pipeline.training.reporting.utilisation import Utilisation
from pipeline.training.settings.job import TeacherConfig, TrainingJob
from pipeline.training.settings.tokens import TokensConfig
from pipeline.training.teacher import columns_of, distilled_loss, open_teacher, teacher_config
from pipeline.training.zero.batch_plan import plan_batch
from pipeline.training.zero.step_times import StepTimes
from shards.errors import UserError
from tests.jobs.reports.test_points import written
from tests.pipeline.models.conversion.published import of_timm
from tests.pipeline.models.parity import imported, random_images
from tests.pipeline.training.test_patch_sizes import OneEngine
from tests.rigs.kills import run_and_kill, step_at_least
from tests.rigs.processes import one_world, patchline
from tests.rigs.training import AT_ONCE, STEPS, FinishedRuns, losses, pretrain_words, resumed_steps, run

NAMES = tuple(map(str, range(10)))
SMALL = ModelConfig(
    name="vit_b16", patch=8, image_size=16, num_classes=10, width=32, depth=1, mlp_width=32, num_heads=2
)
BIT = ModelConfig(name="bit_r50x1", num_classes=10, resnet_units=(1,), resnet_factor=1)
TOKEN = ("--model.distillation-token", "--teacher.share", "0.5")
NUM_STEPS, RATE = 20, 0.05
PLAIN = (  # gradient descent, since Adam enlarges differences in rounding
    *("--model.width", "32", "--model.depth", "2", "--model.mlp-width", "64", "--model.num-heads", "2"),
    *("--steps", str(NUM_STEPS), "--global-batch", "32", "--schedule.warmup-steps", "0"),
    *("--schedule.decay", "constant", "--schedule.learning-rate", str(RATE), "--clip-norm", "0"),
    *("--optimizer.name", "sgd", "--optimizer.momentum", "0", "--optimizer.weight-decay", "0"),
    *("--engine.precision", "fp32", "--device", "cpu"),
)
MIXED = ("--data.mixup.alpha", "0.5", "--data.mixup.cutmix-alpha", "1", "--engine.precision", "fp32")


@pytest.fixture(scope="module")
def logits() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return 3 * torch.randn(8, 10, generator=generator), 3 * torch.randn(8, 10, generator=generator)


@pytest.mark.parametrize("t", [1.0, 3.0])
def test_soft_targets_are_big_visions_kl(logits: tuple[torch.Tensor, torch.Tensor], t: float) -> None:
    student, teacher = (log_softmax(one.double().numpy() / t, axis=1) for one in logits)
    expected = t**2 * (np.exp(teacher) * (teacher - student)).sum(axis=1).mean()
    found = distilled_loss(*logits, TeacherConfig(weights="w", temperature=t))
    assert float(found) == pytest.approx(expected, rel=1e-6)


def test_hard_targets_are_deits_cross_entropy(logits: tuple[torch.Tensor, torch.Tensor]) -> None:
    student, best = log_softmax(logits[0].double().numpy(), axis=1), logits[1].numpy().argmax(axis=1)
    found = distilled_loss(*logits, TeacherConfig(weights="w", target="hard"))
    assert float(found) == pytest.approx(-student[np.arange(len(best)), best].mean(), rel=1e-6)


def weights_at(folder: Path, labels: tuple[str, ...] = NAMES, config: ModelConfig = SMALL) -> Path:
    shapes, generator = shapes_of(config), torch.Generator().manual_seed(0)
    save_weights(
        folder, config=config, labels=labels, tensor=lambda name: torch.randn(shapes[name], generator=generator)
    )
    return folder


def test_classes_are_found_by_name_and_images_are_resized(tmp_path: Path) -> None:
    folder = weights_at(tmp_path / "teacher", labels=NAMES[::-1])
    recipe = digits_smoke()
    job = replace(
        recipe,
        model=replace(recipe.model, num_classes=10),
        teacher=TeacherConfig(weights=str(folder)),
        engine=replace(recipe.engine, precision="fp32"),
    )
    teacher = open_teacher(job, NAMES, say=True)
    assert teacher
    images = torch.randint(0, 256, (2, 16, 16, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        own = teacher.model(images)
    assert torch.equal(teacher.logits(images), own.flip(1)), "by name, not by place"
    large = images.repeat_interleave(2, dim=1).repeat_interleave(2, dim=2)
    assert teacher.logits(large).shape == (2, 10), "a ViT has positions for one size"
    assert not any(parameter.requires_grad for parameter in teacher.model.parameters())


CHANGED: dict[str, tuple[dict[str, object], tuple[str, ...]]] = {
    "as it is": ({}, NAMES),
    "what only training depends on": (
        {"dropout": 0.1, "stochastic_depth": 0.1, "stochastic_depth_rates": "uniform", "position_std": 0.1},
        NAMES,
    ),
    "the name of its sizes": ({"name": "mine"}, NAMES),
    "GELU": ({"gelu": "exact"}, NAMES),
    "epsilon": ({"layer_norm_epsilon": 1e-12}, NAMES),
    "heads": ({"num_heads": 4}, NAMES),
    "where positions are added": ({"position_at": "layers_shared"}, NAMES),
    "two classes exchanged": ({}, ("1", "0", *NAMES[2:])),
}


def test_the_digest_is_of_all_that_predictions_depend_on(tmp_path: Path) -> None:
    """The tensors are the same in all rows; what a run has learned from one teacher would not go on with another."""
    job = replace(digits_smoke(), model=replace(digits_smoke().model, num_classes=10))
    digests = {}
    for number, (name, (fields, labels)) in enumerate(CHANGED.items()):
        folder = weights_at(tmp_path / str(number), labels=labels, config=replace(SMALL, **fields))  # type: ignore[arg-type]
        teacher = open_teacher(replace(job, teacher=TeacherConfig(weights=str(folder))), NAMES, say=False)
        assert teacher
        digests[name] = teacher.sha256
    alike = [name for name, digest in digests.items() if digest == digests["as it is"]]
    assert alike == ["as it is", "what only training depends on", "the name of its sizes"]
    assert len(set(digests.values())) == len(CHANGED) - 2
    other = TeacherConfig(weights=str(tmp_path / "3"), sha256=digests["as it is"])
    with pytest.raises(UserError, match=r"is not the one that teacher\.sha256 .* its model's settings \(GELU"):
        open_teacher(replace(job, teacher=other), NAMES, say=False)


def test_the_plan_and_the_start_count_the_same_memory(digits_url: str, tmp_path: Path) -> None:
    """`patchline plan` shows the teacher's weights, and a start on the planned GPU takes the planned micro-batch."""
    folder, base = weights_at(tmp_path / "teacher", config=replace(SMALL, width=512, mlp_width=2048)), digits_smoke()
    engine = replace(base.engine, precision="bf16", compile="off")
    job = replace(base, run_dir=str(tmp_path / "run"), data=replace(base.data, url=digits_url), engine=engine)
    job = replace(job, teacher=TeacherConfig(weights=str(folder)))
    prepared = prepare(job, one_world())
    assert prepared.teacher
    cost = cost_of(job, num_images=0, num_classes=10, days=1)
    found = forecast(job, cost, gpu="h100", num_gpus=1, rates=Rates(mfu=0.5), num_classes=10)
    assert prepared.budget.teacher == found.budget.teacher == prepared.teacher.config
    budget = replace(found.budget, teacher=prepared.budget.teacher)
    assert fitted(prepared.job, prepared.plan, budget, is_on_gpu=True) == found.fit
    num_bytes = 2 * num_parameters(prepared.teacher.config)
    assert found.fit.memory.teacher == num_bytes
    flags = ("--gpu", "h100", "--num-gpus", "1", "--num-classes", "10", "--training.engine.precision", "bf16")
    shown = patchline("plan", "digits_smoke", *flags, "--training.teacher.weights", str(folder))
    assert f"teacher │ {num_bytes / 1e6:.1f} MB" in " ".join(shown.output.split()), shown.output
    assert "; and the teacher's forward pass, once" in " ".join(shown.output.replace("│", " ").split())


def test_sam_doubles_the_model_but_not_its_teacher(tmp_path: Path) -> None:
    """In what `plan` counts, in MFU, and in what `compare` counts of a run of one step."""
    base, teacher = digits_smoke(), TeacherConfig(weights=str(weights_at(tmp_path / "teacher")))
    model, engine = replace(base.model, num_classes=10), replace(base.engine, precision="fp32")
    job = replace(base, model=model, engine=engine, teacher=teacher)
    once, taught = cost_of(job, num_images=0, num_classes=10, days=1).train_flops, forward_flops(SMALL)
    job = replace(job, optimizer=replace(job.optimizer, sam_rho=0.1))
    assert cost_of(job, num_images=0, num_classes=10, days=1).train_flops == 2 * (once - taught) + taught
    utilisation = Utilisation(job, one_world(), StepTimes(), teacher=teacher_config(job))
    utilisation.nominal_peak = 1e12
    in_second = (2 * (once - taught) + taught) * job.global_batch
    assert utilisation.values(1.0, step=1)["perf/mfu"] == pytest.approx(in_second / 1e12)
    run_dir = written(tmp_path / "run", optimizer=job.optimizer, teacher=teacher)
    assert point_of(run_dir, name="run").own_exaflops == pytest.approx(in_second / 1e18)
    shutil.rmtree(teacher.weights)
    found = point_of(run_dir, name="run")
    assert (found.exaflops, found.uncounted) == (None, ("its teacher",))
    assert found.own_exaflops == pytest.approx((in_second - taught * job.global_batch) / 1e18)


def test_a_resnet_teaches_images_of_any_size(tmp_path: Path) -> None:
    """It is the same teacher in runs of other sizes, and its operations are those of the images of each step."""
    weights = str(weights_at(tmp_path / "teacher", config=BIT))
    base, config = digits_smoke(), TeacherConfig(weights=weights)
    jobs = [
        replace(base, model=replace(base.model, num_classes=10, image_size=size), teacher=config) for size in (16, 32)
    ]
    first, second = (open_teacher(job, NAMES, say=False) for job in jobs)
    assert first
    assert second
    assert first.sha256 == second.sha256
    short, engine = replace(base.schedule, warmup_steps=0), replace(base.engine, precision="fp32")
    job = replace(jobs[1], steps=4, schedule=short, engine=engine)
    job = replace(job, tokens=TokensConfig(image_sizes=(16,), size_steps=(3,)))
    own = [flops_at(job, step) for step in range(4)]
    taught = [forward_flops(replace(BIT, image_size=size)) for size in (16, 16, 16, 32)]
    assert taught[0] < taught[3] / 2
    cost = cost_of(job, num_images=0, num_classes=10, days=1)
    assert cost.train_flops == round((sum(own) + sum(taught)) / 4)
    utilisation = Utilisation(job, one_world(), StepTimes(), teacher=teacher_config(job))
    utilisation.nominal_peak = 1e12
    for step in (1, 4):
        in_step = (own[step - 1] + taught[step - 1]) * job.global_batch
        assert utilisation.values(1.0, step=step)["perf/mfu"] == pytest.approx(in_step / 1e12)


def test_a_teacher_has_no_backward_pass_to_be_recomputed_for(tmp_path: Path) -> None:
    base = digits_smoke()
    engine = replace(base.engine, precision="bf16", activation_checkpointing="full")
    job = replace(base, engine=engine, model=replace(base.model, num_classes=10))
    job = replace(job, teacher=TeacherConfig(weights=str(weights_at(tmp_path / "teacher"))))
    cost, taught = cost_of(job, num_images=0, num_classes=10, days=1), forward_flops(SMALL)
    found = forecast(job, cost, gpu="h100", num_gpus=1, rates=Rates(mfu=0.5), num_classes=10)
    computed = 4 / 3 * (cost.train_flops - taught) + taught
    assert found.step.compute == pytest.approx(job.global_batch * computed / (0.5 * 989e12))
    assert found.mfu_reached / found.hfu == pytest.approx(cost.train_flops / computed)


def test_the_watch_for_attention_sees_no_pass_of_the_teacher(tmp_path: Path) -> None:
    """The teacher's layers may compute it by another kernel than the model's."""
    job = replace(digits_smoke(), global_batch=8, model=replace(digits_smoke().model, num_classes=10))
    job = replace(job, teacher=TeacherConfig(weights=str(weights_at(tmp_path / "teacher"))))
    teacher, model, seen = open_teacher(job, NAMES, say=False), build_model(job.model), list[str]()
    assert teacher
    plan = plan_batch(8, micro_batch=8, num_ranks=1, lanes=8)
    gradients = Gradients(job, plan, OneEngine(model), one_world(), teacher=teacher)  # type: ignore[arg-type]

    @contextmanager
    def watched() -> Iterator[None]:
        seen.append("begin")
        yield
        seen.append("end")

    gradients.watched = watched
    teacher.model.register_forward_hook(lambda *_: seen.append("teacher"))
    model.register_forward_hook(lambda *_: seen.append("model"))
    numbers, images = torch.arange(8), torch.zeros(8, 32, 32, 3, dtype=torch.uint8)
    gradients.accumulate(Batch(step=0, images=images, labels=numbers[:, None], sample_ids=numbers, datasets=numbers))
    assert seen == ["teacher", "begin", "model", "end"]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("vit_base_patch16_clip_quickgelu_224", id="CLIP"),
        pytest.param("deit_tiny_distilled_patch16_224", id="both heads of a distilled DeiT"),
    ],
)
def test_a_published_folder_is_a_teacher(tmp_path: Path, digits_url: str, name: str) -> None:
    """Its classes have no names, so they are 0, 1, ..., as those of the digits."""
    other = of_timm(imported("timm"), name, tmp_path / "teacher", num_classes=10)
    taught = ("--teacher.weights", str(tmp_path / "teacher"), "--model.image-size", "48")
    words = ("pretrain", "digits_smoke", "--data.url", digits_url, "--run-dir", str(tmp_path / "run"), *taught)
    ended = patchline(*words, "--steps", "1", "--global-batch", "8", "--log-every-steps", "1", "--device", "cpu")
    assert ended.code == 0, ended.errors
    job = read_record(tmp_path / "run" / "job.yaml", stage="pretrain", kind=TrainingJob)
    teacher = open_teacher(job, NAMES, say=False)
    images_BHW3 = random_images(48, 48)
    cfg: Any = other.pretrained_cfg
    mean, deviation = torch.tensor(cfg["mean"]), torch.tensor(cfg["std"])
    with torch.no_grad():
        theirs_BK = other(((images_BHW3 / 255 - mean) / deviation).permute(0, 3, 1, 2))
    assert teacher
    torch.testing.assert_close(teacher.logits(images_BHW3), theirs_BK, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("labels", "names", "said"),
    [
        pytest.param(NAMES, (*NAMES[:9], "ten"), r"lacks 'ten'; the model has 10 classes", id="another class"),
        pytest.param(tuple(map(str, range(12))), NAMES, "has 12 classes; the model has 10 classes", id="more classes"),
        pytest.param(
            NAMES, NAMES[:7], "has 10 classes; the model has 10 classes, of which the data has 7", id="less data"
        ),
    ],
)
def test_other_classes_are_refused(tmp_path: Path, labels: tuple[str, ...], names: tuple[str, ...], said: str) -> None:
    folder = weights_at(tmp_path / "teacher", labels=labels, config=replace(SMALL, num_classes=len(labels)))
    with pytest.raises(UserError, match=said):
        columns_of(open_weights(str(folder)), names, num_classes=10)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"share": 0.5}, "say nothing without teacher.weights"),
        ({"weights": "w", "target": "hard", "temperature": 2.0}, "teacher.target 'hard', which it does not change"),
        ({"weights": "w", "share": 0.0}, r"teacher\.share is 0"),
    ],
)
def test_settings_without_an_effect_are_refused(settings: dict[str, object], said: str) -> None:
    with pytest.raises(UserError, match=said):
        TeacherConfig(**settings)  # type: ignore[arg-type]


def test_a_missing_teacher_is_called_so() -> None:
    with pytest.raises(UserError, match=r"--teacher\.weights: no weights at 'gone'"):
        teacher_config(replace(digits_smoke(), teacher=TeacherConfig(weights="gone")))
    ended = patchline("plan", "digits_smoke", "--training.teacher.weights", "gone")
    assert "--training.teacher.weights: no weights at 'gone'" in ended.errors


def test_a_sigmoid_has_no_teacher() -> None:
    with pytest.raises(UserError, match="give --loss softmax"):
        TrainingJob(loss="sigmoid", teacher=TeacherConfig(weights="w"))


def test_weights_of_labels_score_a_student_that_learns_from_its_teacher_alone() -> None:
    data, evaluation = DataConfig(label_weights=True), EvaluationConfig(url="data/digits-test")
    assert TrainingJob(data=data, evaluation=evaluation, teacher=TeacherConfig(weights="w")).is_scored
    with pytest.raises(UserError):
        TrainingJob(data=data, teacher=TeacherConfig(weights="w"))


def test_a_copy_of_the_teacher_has_nothing_to_learn(
    digits_url: str, finished_runs: FinishedRuns, tmp_path: Path
) -> None:
    """Mixup and CutMix are on: the divergence is 0 only if both see the same pixels in every micro-batch and rank."""
    weights = str(finished_runs.get(1) / "weights")
    more = ("--initial.weights", weights, "--initial.no-new-head", "--teacher.weights", weights, *MIXED)
    words = pretrain_words(
        digits_url, tmp_path / "run", *more, "--micro-batch", "8", "--schedule.learning-rate", "1e-6"
    )
    assert run(words, num_ranks=2, log_dir=tmp_path) == exit_codes.DONE
    assert max(map(abs, losses(tmp_path / "run").values())) < 1e-6


def test_a_student_learns_the_same_on_any_topology_and_from_that_teacher_only(
    digits_url: str, finished_runs: FinishedRuns, tmp_path: Path
) -> None:
    """Ranks, stages and micro-batches change its loss to rounding, a continuation no bit, and the teacher may move."""
    first, moved, other = (tmp_path / name for name in ("teacher", "moved", "other"))
    shutil.copytree(finished_runs.get(1) / "weights", first)
    taught = ("--teacher.share", "0.5", *MIXED)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    more = ("--micro-batch", "4", "--engine.zero-stage", "3")
    for run_dir, num_ranks, own in ((whole, 1, ()), (parts, 2, more)):
        words = pretrain_words(digits_url, run_dir, "--teacher.weights", str(first), *taught, *own)
        assert run(words, num_ranks=num_ranks, log_dir=tmp_path) == exit_codes.DONE
    expected = losses(whole)
    assert list(losses(parts).values()) == pytest.approx(list(expected.values()), rel=1e-4)
    record = json.loads(next((whole / "checkpoints").glob(f"step-{STEPS:08d}/*/MANIFEST.json")).read_text())
    assert len(str(record["job"]["job"]["teacher"]["sha256"])) == 64

    first.rename(moved)
    shutil.rmtree(whole / "weights")
    shutil.rmtree(whole / "checkpoints" / f"step-{STEPS:08d}")
    (whole / "DONE").unlink()
    weights_at(other)
    ended = patchline(*pretrain_words(digits_url, whole, "--teacher.weights", str(other), *taught))
    assert (ended.code, "teacher.sha256" in ended.errors) == (2, True), ended.errors
    ended = patchline(*pretrain_words(digits_url, whole))
    assert (ended.code, "teacher.weights: before " in ended.errors, ", now ''" in ended.errors) == (2, True, True)
    words = pretrain_words(digits_url, whole, "--teacher.weights", str(moved), *taught)
    assert run(words, num_ranks=1, log_dir=tmp_path) == exit_codes.DONE
    assert losses(whole) == expected


def deits_loss(
    heads: tuple[torch.Tensor, torch.Tensor], labels: torch.Tensor, taught: torch.Tensor, target: str
) -> torch.Tensor:
    """DistillationLoss of DeiT's losses.py with alpha 0.5; soft, with tau 3, is divided by images, as big_vision's."""
    of_class, of_token = (logits.log_softmax(dim=1) for logits in heads)
    base = -of_class.gather(1, labels).mean()
    if target == "hard":
        return 0.5 * base - 0.5 * of_token.gather(1, taught.argmax(dim=1, keepdim=True)).mean()
    student, teacher = (heads[1] / 3).log_softmax(dim=1), (taught / 3).log_softmax(dim=1)
    return 0.5 * base + 0.5 * 9 * (teacher.exp() * (teacher - student)).sum() / len(labels)


def plain_torch(url: str, folder: Path, teacher: str, target: str) -> tuple[list[float], ViT]:
    """The losses and the last weights of a run with a distillation token, as a loop of a few lines."""
    recipe, taught = digits_smoke(), filled_model(open_weights(teacher))
    sizes = replace(recipe.model, num_classes=10, width=32, depth=2, mlp_width=64, num_heads=2)
    model = build_model(replace(sizes, distillation_token=True))
    assert isinstance(model, ViT)
    assert model.head_dist is not None
    data: DataConfig = replace(recipe.data, url=url)
    found, parameters = list[float](), list(model.parameters())
    with train_batches(global_batch=32, image_size=32, config=data, quarantine=folder / "listed") as batches:
        for batch in islice(batches, NUM_STEPS):
            tokens = model.norm(model.tokens(batch.images))
            heads = (
                F.linear(tokens[:, 0], model.head.weight, model.head.bias),
                F.linear(tokens[:, 1], model.head_dist.weight, model.head_dist.bias),
            )
            with torch.no_grad():
                answers = taught(batch.images)
            loss = deits_loss(heads, batch.labels[:, :1], answers, target)
            for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                parameter.data -= RATE * gradient
            found.append(loss.item())
    return found, model.eval()


@pytest.mark.parametrize("target", ["hard", "soft"])
def test_each_head_learns_from_its_own_source_as_in_deit(
    digits_url: str, tmp_path: Path, target: Literal["hard", "soft"]
) -> None:
    teacher = str(weights_at(tmp_path / "teacher", config=replace(SMALL, image_size=32)))
    run_dir, more = tmp_path / "run", ("--teacher.temperature", "3") if target == "soft" else ()
    words = ["pretrain", "digits_smoke", "--data.url", digits_url, "--run-dir", str(run_dir), *PLAIN, *TOKEN]
    words += ["--teacher.weights", teacher, "--teacher.target", target, *more]
    assert run(words, num_ranks=1, log_dir=tmp_path) == exit_codes.DONE
    expected, model = plain_torch(digits_url, tmp_path, teacher, target)
    assert list(losses(run_dir).values()) == pytest.approx(expected, rel=1e-6)
    assert expected[-1] < expected[0]
    weights = open_weights(str(run_dir / "weights"))
    images = torch.randint(0, 256, (4, 32, 32, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        tokens = model.norm(model.tokens(images))
        assert model.head_dist is not None
        mean = (model.head(tokens[:, 0]) + model.head_dist(tokens[:, 1])) / 2
        torch.testing.assert_close(filled_model(weights)(images), mean, atol=1e-5, rtol=0)


def first_batch(url: str, folder: Path, *, image_size: int) -> Batch:
    """That of a run, whose 32 images are the same at any size."""
    data = replace(digits_smoke().data, url=url)
    with train_batches(global_batch=32, image_size=image_size, config=data, quarantine=folder / "listed") as batches:
        return next(iter(batches))


@pytest.mark.parametrize(
    "stages",
    [
        pytest.param(("3",), id="stage 3"),
        pytest.param(
            ("1", "2"), id="stages 1 and 2", marks=pytest.mark.long
        ),  # the gate has stage 3, which gathers each head
    ],
)
def test_both_heads_learn_the_same_on_any_topology(
    digits_url: str, finished_runs: FinishedRuns, tmp_path: Path, stages: tuple[str, ...]
) -> None:
    """On 2 ranks to rounding, and after a resume to the bit; its weights are then fine-tuned at a higher resolution,
    without a teacher."""
    taught = ("--teacher.weights", str(finished_runs.get(1) / "weights"), "--teacher.target", "hard", *TOKEN, *MIXED)
    whole = tmp_path / "whole"
    words = pretrain_words(digits_url, whole, *taught)
    assert run(words, num_ranks=1, log_dir=tmp_path) == exit_codes.DONE
    expected = losses(whole)
    for stage in stages:
        own = ("--micro-batch", "4", "--engine.zero-stage", stage)
        parts = pretrain_words(digits_url, tmp_path / stage, *taught, *own)
        assert run(parts, num_ranks=2, log_dir=tmp_path) == exit_codes.DONE
        assert list(losses(tmp_path / stage).values()) == pytest.approx(list(expected.values()), rel=1e-4)

    source = shutil.copytree(whole / "weights", tmp_path / "source")
    larger = ("--initial.weights", str(source), "--model.distillation-token", "--model.image-size", "48")
    more = ("--initial.no-new-head", "--engine.precision", "fp32")
    tuned = pretrain_words(digits_url, tmp_path / "tuned", *larger, *more)
    assert run(tuned, num_ranks=1, log_dir=tmp_path) == exit_codes.DONE
    small, large = (first_batch(digits_url, tmp_path, image_size=side) for side in (32, 48))
    model, taught_by = (filled_model(open_weights(str(path))) for path in (source, finished_runs.get(1)))
    with torch.no_grad():
        heads = model(small.images, heads_apart=True).unbind(dim=1)
        sources = (small.labels[:, 0], taught_by(small.images).argmax(dim=1))
        of_heads = [float(F.cross_entropy(*pair)) for pair in zip(heads, sources, strict=True)]
        of_mean = float(F.cross_entropy(model(large.images), large.labels[:, 0]))
    assert max(of_heads) < math.log(10) - 0.01, (
        "a head whose loss is left out stays 0, and its loss the logarithm of 10"
    )
    assert losses(tmp_path / "tuned")[1] == pytest.approx(of_mean, rel=1e-5), (
        "both heads are kept, and predict together"
    )

    shutil.rmtree(whole / "weights")
    shutil.rmtree(whole / "checkpoints" / f"step-{STEPS:08d}")
    (whole / "DONE").unlink()
    assert run(words, num_ranks=1, log_dir=tmp_path) == exit_codes.DONE
    assert losses(whole) == expected
    assert (whole / "weights" / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


def test_an_imported_teacher_survives_a_kill(digits_url: str, tmp_path: Path) -> None:
    """A folder of timm's, made a weights folder by `patchline import`, teaches a run that is killed and continued: the
    losses and the weights are those of the unbroken run, to the bit."""
    model, published, imported = replace(SMALL, image_size=32, gelu="exact"), tmp_path / "timm", tmp_path / "teacher"
    shapes, draws = shapes_of(model), torch.Generator().manual_seed(1)
    tensors = {name: 0.2 * torch.randn(shape, generator=draws) for name, shape in shapes.items()}
    save_timm(published, config=model, labels=NAMES, tensor=tensors.__getitem__)
    ended = patchline("import", str(published), "--out", str(imported))
    assert ended.code == 0, ended.errors
    taught = ("--teacher.weights", str(imported), "--teacher.share", "0.5", *MIXED, *AT_ONCE)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert run(pretrain_words(digits_url, whole, *taught), num_ranks=1, log_dir=tmp_path) == exit_codes.DONE
    words = pretrain_words(digits_url, broken, *taught)
    assert run_and_kill(words, broken, moment=step_at_least(9), num_ranks=1, log_dir=tmp_path)
    assert run(words, num_ranks=1, log_dir=tmp_path) == exit_codes.DONE
    assert resumed_steps(broken) == [0, 8]
    assert losses(broken) == losses(whole)
    weights = [(folder / "weights" / "model.safetensors").read_bytes() for folder in (whole, broken)]
    assert weights[0] == weights[1]
