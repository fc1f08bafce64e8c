"""Fragments of a single rank are the whole model, for every stage; moments and the weights' average appear and can be
overwritten."""

import pytest

from tests.rigs.processes import program

PROGRAM = """
import sys, torch
from pipeline.models import ModelConfig, ViT, shapes_of
from pipeline.models.initial import initial_tensor
from pipeline.training.batch_plan import plan_batch
from pipeline.training.engine import Engine, EngineConfig
from pipeline.training.optimizer import OptimizerConfig
from pipeline.world import current_world, enter, leave

stage, precision, accumulation = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
config = ModelConfig(name="vit", image_size=16, num_classes=3, patch=8, depth=1, width=24, mlp_width=40, num_heads=2)
enter(current_world("cpu"))
plan = plan_batch(8, micro_batch=8 // accumulation, num_ranks=1, lanes=1)
engine = Engine(
    ViT(config), config=EngineConfig(zero_stage=stage, precision=precision), plan=plan,
    optimizer=OptimizerConfig(), clip_norm=0.0,
)
values = {name: initial_tensor(name, shape, seed=5) for name, shape in shapes_of(config).items()}

def fill(fragment, slot):
    source = values[fragment.name].flatten() if slot == "master" else torch.full((fragment.length,), 0.25)
    fragment.slots[slot].copy_(source[fragment.start : fragment.start + fragment.length])

engine.load(fill, moments=["exp_avg", "exp_avg_sq"], num_updates=7)
found = {f.name: f for f in engine.fragments()}
assert set(found) == set(values), "every parameter has a fragment"
for name, fragment in found.items():
    assert (fragment.start, fragment.length) == (0, values[name].numel()), name
    assert torch.equal(fragment.slots["master"], values[name].flatten()), "masters are unrounded fp32"
    assert set(fragment.slots) == {"master", "exp_avg", "exp_avg_sq"}
    assert bool((fragment.slots["exp_avg"] == 0.25).all())
if stage < 3:  # under stage 3 the model's own weights are gathered only while it runs
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    for name, parameter in engine.module.named_parameters():
        assert torch.equal(parameter.detach(), values[name].to(dtype)), "the model's weights follow the masters"
leave()
"""

AVERAGING = """
import sys, torch
from pipeline.models import ModelConfig, ViT, shapes_of
from pipeline.models.initial import initial_tensor
from pipeline.training.batch_plan import plan_batch
from pipeline.training.engine import Engine, EngineConfig
from pipeline.models.loss import classification_loss
from pipeline.training.optimizer import OptimizerConfig
from pipeline.world import current_world, enter, leave

stage, precision, accumulation = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
config = ModelConfig(name="vit", image_size=16, num_classes=3, patch=8, depth=1, width=24, mlp_width=40, num_heads=2)
enter(current_world("cpu"))
plan = plan_batch(8, micro_batch=8 // accumulation, num_ranks=1, lanes=1)
engine = Engine(
    ViT(config), config=EngineConfig(zero_stage=stage, precision=precision), plan=plan,
    optimizer=OptimizerConfig(), clip_norm=0.0, ema_decay=0.75,
)
values = {name: initial_tensor(name, shape, seed=5) for name, shape in shapes_of(config).items()}

def fill(fragment, slot):
    source = values[fragment.name].flatten()
    if slot != "master":
        source = torch.full_like(source, 0.5 if slot == "average" else 0.0)
    fragment.slots[slot].copy_(source[fragment.start : fragment.start + fragment.length])

def copies(slot):
    return {fragment.name: fragment.slots[slot].clone() for fragment in engine.fragments()}

engine.load(fill, moments=[], num_updates=0)
expected = copies("average")
assert all(torch.equal(expected[name], value.flatten()) for name, value in values.items()), "it begins at the masters"
images, labels = torch.randint(0, 255, (8, 16, 16, 3), dtype=torch.uint8), torch.arange(8)[:, None] % 3
for _ in range(3):
    for micro in range(accumulation):
        part = slice(micro * plan.micro_batch, (micro + 1) * plan.micro_batch)
        engine.accumulate(lambda model: classification_loss(model(images[part]), labels[part], name="softmax"))
    engine.update(learning_rate=0.01)
    masters = copies("master")
    expected = {name: 0.75 * value + 0.25 * masters[name] for name, value in expected.items()}
for name, average in copies("average").items():
    torch.testing.assert_close(average, expected[name])
assert not torch.equal(copies("average")["head.weight"], copies("master")["head.weight"])
slots = set(engine.fragments()[0].slots)
assert slots == {"master", "exp_avg", "exp_avg_sq", "average"}, slots

engine.load(fill, moments=["average", "exp_avg", "exp_avg_sq"], num_updates=3)
assert all(bool((average == 0.5).all()) for average in copies("average").values()), "a saved average comes back"
leave()
"""


@pytest.mark.parametrize(
    ("stage", "precision", "accumulation"),
    [(1, "bf16", 1), (1, "fp32", 1), (1, "bf16", 2), (2, "bf16", 1), (3, "bf16", 1), (3, "fp32", 1)],
)
def test_masters_and_moments_can_be_read_and_overwritten(stage: int, precision: str, accumulation: int) -> None:
    ended = program(PROGRAM, str(stage), precision, str(accumulation))
    assert ended.code == 0, ended.errors


@pytest.mark.parametrize(
    ("stage", "precision", "accumulation"), [(1, "bf16", 1), (1, "bf16", 2), (2, "fp32", 1), (3, "bf16", 1)]
)
def test_the_average_of_the_weights_follows_every_update(stage: int, precision: str, accumulation: int) -> None:
    ended = program(AVERAGING, str(stage), precision, str(accumulation))
    assert ended.code == 0, ended.errors
