"""The predicted memory of a rank, compared with what PyTorch allocated in real steps."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from pipeline.models.config import ModelConfig
from pipeline.models.flops import num_parameters
from pipeline.ranks.world import bf16_of
from pipeline.training.fitting.memory import Topology, memory_of
from pipeline.training.settings.job import EngineConfig, OptimizerConfig, TeacherConfig, TrainingJob
from tests.rigs.peaks import peak_bytes

NEEDS_BF16 = pytest.mark.skipif(
    not bf16_of(torch.device("cpu")).is_native, reason="this CPU emulates bf16, which takes 8 times as long"
)
GPU = Topology(num_ranks=8, is_on_gpu=True)


def job_of(model: str = "vit_s16", *, images: int, engine: Any = None, **changed: Any) -> TrainingJob:
    """Small buckets, as they are beside a large model. `engine`: changed fields."""
    fields = {name: changed.pop(name) for name in ("image_size", "depth", "num_classes") if name in changed}
    return TrainingJob(
        model=ModelConfig(name=model, **fields),
        global_batch=images,
        loss="sigmoid",
        engine=EngineConfig(**({"precision": "fp32", "reduce_bucket": 1_000_000} | (engine or {}))),
        **changed,
    )


BF16 = {"precision": "bf16"}
BLOCK = 12 * 384**2 + 13 * 384  # elements of a block of ViT-S/16, which a bucket takes at least
SMALL: dict[str, Any] = {"image_size": 32, "depth": 2}
LARGE_HEAD: dict[str, Any] = SMALL | {"num_classes": 20_000}


@pytest.mark.parametrize(
    ("job", "micro_batch", "num_ranks"),
    [
        pytest.param(job_of(images=4), 4, 1, id="ViT-S/16, fp32", marks=pytest.mark.long),
        pytest.param(
            job_of(images=4, engine=BF16), 2, 1, id="ViT-S/16, bf16, two passes", marks=[NEEDS_BF16, pytest.mark.long]
        ),
        pytest.param(
            job_of(images=4, engine={"activation_checkpointing": "full"}),
            4,
            1,
            id="ViT-S/16 with checkpointing",
            marks=pytest.mark.long,
        ),
        pytest.param(job_of("vit_b16", images=1), 1, 1, id="ViT-B/16, fp32", marks=pytest.mark.long),
        pytest.param(
            job_of("vit_b16", images=2, engine=BF16, ema_decay=0.9),
            2,
            1,
            id="ViT-B/16, bf16",
            marks=(NEEDS_BF16, pytest.mark.long),
        ),
        pytest.param(
            job_of("bit_r50x1", images=2, optimizer=OptimizerConfig(name="sgd")), 2, 1, id="BiT", marks=pytest.mark.long
        ),
        pytest.param(
            job_of(images=2, optimizer=OptimizerConfig(name="muon"), image_size=32, depth=4),
            1,
            2,
            id="Muon",
            marks=pytest.mark.long,
        ),
        pytest.param(job_of(images=4, engine={"zero_stage": 2}, **SMALL), 1, 2, id="stage 2 on two ranks, two passes"),
        pytest.param(
            job_of(images=2, engine={"zero_stage": 3}, **SMALL),
            *(1, 2),
            id="stage 3 on two ranks",
            marks=pytest.mark.long,  # as with more blocks
        ),
        pytest.param(
            job_of(images=4, engine={"zero_stage": 3}, **SMALL),
            1,
            4,
            id="stage 3 on four ranks",
            marks=pytest.mark.long,
        ),
        pytest.param(job_of(images=2, engine={"zero_stage": 3}), 1, 2, id="ViT-S/16, stage 3", marks=pytest.mark.long),
        pytest.param(
            job_of(images=2, engine={"zero_stage": 3}, image_size=32, depth=8),
            *(1, 2),
            id="stage 3, of whose eight blocks two are gathered",
        ),
        pytest.param(
            job_of(images=4, engine=BF16 | {"zero_stage": 3}, **SMALL),
            *(1, 2),
            id="stage 3, bf16, two passes",
            marks=(NEEDS_BF16, pytest.mark.long),  # as stage 3 in fp32, and sums in bf16
        ),
        pytest.param(job_of(images=4, **LARGE_HEAD), 2, 2, id="a head larger than a bucket"),
        pytest.param(
            job_of(images=4, engine={"zero_stage": 2}, **LARGE_HEAD),
            *(1, 2),
            id="a large head, stage 2, two passes",
            marks=pytest.mark.long,  # as with sums in bf16
        ),
        pytest.param(
            job_of(images=4, engine=BF16 | {"zero_stage": 2, "reduce_precision": "bf16"}, **LARGE_HEAD),
            *(1, 2),
            id="a large head, sums in bf16, two passes",
            marks=NEEDS_BF16,
        ),
        pytest.param(
            job_of(images=16, optimizer=OptimizerConfig(freeze_backbone=True)),
            16,
            1,
            id="a frozen ViT-S/16",
            marks=pytest.mark.long,
        ),
    ],
)
def test_it_is_what_training_allocates(job: TrainingJob, micro_batch: int, num_ranks: int) -> None:
    topology = Topology(num_ranks=num_ranks, is_on_gpu=False)
    predicted = memory_of(job, topology, micro_batch=micro_batch).peak
    assert predicted == pytest.approx(peak_bytes(job, micro_batch=micro_batch, num_ranks=num_ranks), rel=0.1)


TEACHERS = {
    "large": ModelConfig(name="vit_s16", image_size=64, depth=4, num_classes=10),
    "of a higher resolution": ModelConfig(name="vit_ti16", image_size=256, depth=2, num_classes=10),
    "small": ModelConfig(name="vit_ti16", image_size=64, depth=1, num_classes=10),
}


def student(*, images: int, depth: int = 2, **changed: Any) -> TrainingJob:
    """With 2 layers, a model so small that a large teacher's forward pass takes more memory than its own passes."""
    model = ModelConfig(name="vit_ti16", image_size=64, depth=depth, num_classes=10)
    job = replace(job_of(images=images), model=model, loss="softmax")
    return replace(job, teacher=TeacherConfig(weights="w", share=0.5), **changed)


@pytest.mark.parametrize("name", TEACHERS)
def test_a_teacher_takes_what_training_allocates_for_it(name: str) -> None:
    job, teacher = student(images=64, depth=6 if name == "small" else 1), TEACHERS[name]
    topology = Topology(num_ranks=1, is_on_gpu=False)
    predicted = memory_of(job, topology, micro_batch=32, teacher=teacher)
    assert predicted.peak == pytest.approx(peak_bytes(job, micro_batch=32, teacher=teacher), rel=0.1)
    assert predicted.teacher == 4 * num_parameters(teacher)
    alone = memory_of(replace(job, teacher=TeacherConfig()), topology, micro_batch=32)
    assert predicted.activations > alone.activations, "its pass, or at least its logits"


def test_a_teachers_memory_grows_with_the_micro_batch_and_the_precision() -> None:
    job, teacher = student(images=4096, engine=EngineConfig(precision="bf16")), TEACHERS["large"]
    one, two, four = (memory_of(job, GPU, micro_batch=size, teacher=teacher) for size in (8, 16, 32))
    assert four.peak - two.peak == 2 * (two.peak - one.peak) > 0
    assert one.teacher == four.teacher == 2 * num_parameters(teacher), "each rank has all of it, in the run's precision"
    sharded = replace(job, engine=replace(job.engine, zero_stage=3))
    assert memory_of(sharded, GPU, micro_batch=8, teacher=teacher).teacher == one.teacher
    sam = replace(job, optimizer=replace(job.optimizer, sam_rho=0.1))
    again = memory_of(sam, GPU, micro_batch=8, teacher=teacher)
    assert again.peak - one.peak == 4 * 10 * 4096 // 8, "the logits of a rank's share"


def test_a_teacher_cannot_be_forgotten() -> None:
    for job, teacher in (
        (student(images=8), None),
        (replace(student(images=8), teacher=TeacherConfig()), TEACHERS["small"]),
    ):
        with pytest.raises(ValueError, match="memory is planned for a teacher"):
            memory_of(job, GPU, micro_batch=1, teacher=teacher)


def test_the_parts_are_worked_out_by_hand() -> None:
    """ViT-S/16, 22,050,664 parameters, on 8 GPUs in bf16."""
    job = job_of(images=64, engine=BF16, ema_decay=0.5)
    found, part = memory_of(job, GPU, micro_batch=8), 22_050_664 // 8
    assert (found.weights, found.masters, found.moments) == (2 * 22_050_664, 4 * part, 8 * part)
    assert (found.average, found.state) == (4 * part, 16 * part)
    sgd = memory_of(replace(job, optimizer=OptimizerConfig(name="sgd")), GPU, micro_batch=8)
    assert sgd.moments == found.masters
    muon = memory_of(replace(job, optimizer=OptimizerConfig(name="muon")), GPU, micro_batch=8)
    assert found.moments - muon.moments == 4 * 12 * 12 * 384**2 // 8, "of 12 blocks' matrices, one moment"
    narrow = memory_of(replace(job, optimizer=OptimizerConfig(first_moment="bf16")), GPU, micro_batch=8)
    assert (narrow.moments, narrow.saved, found.saved) == (6 * part, 16 * part, 16 * part)
    sharded = memory_of(replace(job, engine=replace(job.engine, zero_stage=3)), GPU, micro_batch=8)
    assert sharded.state == found.state
    twice = memory_of(job, GPU, micro_batch=4)
    assert twice.gradients - found.gradients == 4 * 22_050_664, "micro-batches are added up in fp32"


def test_sums_in_bf16_need_no_copy_in_fp32() -> None:
    wide, narrow = (
        memory_of(job_of(images=64, engine=BF16 | {"reduce_precision": chosen, "zero_stage": 3}), GPU, micro_batch=8)
        for chosen in ("fp32", "bf16")
    )
    assert wide.gradients - narrow.gradients == 4 * BLOCK, "a bucket"


def test_memory_grows_by_the_same_amount_for_each_image() -> None:
    job = job_of(images=4096, engine=BF16)
    eight, sixteen, more = (memory_of(job, GPU, micro_batch=size).peak for size in (8, 16, 32))
    assert more - sixteen == 2 * (sixteen - eight) > 0


def test_what_is_not_decided_cannot_be_planned() -> None:
    for job in (job_of(images=8, engine={"precision": "auto"}), job_of(images=8, num_classes=0)):
        with pytest.raises(ValueError, match="decide them before memory is planned"):
            memory_of(job, GPU, micro_batch=8)


@pytest.mark.parametrize(("stage", "num_buckets"), [(1, 1), (2, 1), (3, 0)])
def test_overlap_takes_a_second_bucket(stage: int, num_buckets: int) -> None:
    job = job_of(images=64, engine={"zero_stage": stage, "precision": "bf16"})
    on, auto, off = (
        memory_of(replace(job, engine=replace(job.engine, overlap=overlap)), GPU, micro_batch=8).gradients
        for overlap in ("on", "auto", "off")
    )
    assert on == auto == off + num_buckets * 2 * BLOCK
