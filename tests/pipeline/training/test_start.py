"""Where a run starts from, and which changes are refused when it continues."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from jobs.recipes.finetune import digits_48
from jobs.recipes.pretrain import digits_smoke
from pipeline.models import build_model
from pipeline.models.initial import initial_tensor
from pipeline.models.weights import save_weights
from pipeline.training.config import InitialConfig, OptimizerConfig, TrainingJob
from pipeline.training.schedule import ScheduleConfig
from pipeline.training.start import SavedJob, refuse_changes, starting_weights
from shards.errors import UserError


def with_classes(job: TrainingJob) -> TrainingJob:
    return replace(job, model=replace(job.model, num_classes=10))


def test_scratch_is_the_initial_value_of_the_seed() -> None:
    job = replace(with_classes(digits_smoke()), seed=3)
    shape = (1, 17, 128)
    expected = initial_tensor("embed.position", shape, seed=3, position_std=0.3)
    assert torch.equal(starting_weights(job)("embed.position"), expected)


def test_fine_tuning_takes_the_weights_with_a_new_head_and_a_larger_grid(tmp_path: Path) -> None:
    source = with_classes(digits_smoke()).model
    model = build_model(source, seed=1)
    with torch.no_grad():
        model.head.weight.normal_()
    state = model.state_dict()
    save_weights(tmp_path / "weights", config=source, labels=("a",) * 10, tensor=lambda name: state[name])
    job = replace(with_classes(digits_48()), initial=InitialConfig(weights=str(tmp_path / "weights")))

    tensor = starting_weights(job)

    assert torch.equal(tensor("blocks.0.attention.qkv.weight"), state["blocks.0.attention.qkv.weight"])
    assert tensor("embed.position").shape == (1, 1 + 36, 128)
    assert torch.count_nonzero(tensor("head.weight")) == 0
    with pytest.raises(UserError, match=r"blocks\.0\.norm1\.weight is \[128\], the model needs \[64\]"):
        starting_weights(replace(job, model=replace(job.model, width=64)))


def test_what_would_be_another_run_is_refused_by_name() -> None:
    job = with_classes(digits_smoke())
    state = {"seed": 0, "lanes": 8, "decoder": {"simplejpeg": "1.9.0"}}
    saved = SavedJob(step=4, model=asdict(job.model), loss="softmax", optimizer="adamw", data_state=state)
    refuse_changes(saved, data_state=state, job=job)
    table = [
        ({**state, "lanes": 16}, job, r"\n  data\.lanes: before 8, now 16\n"),
        (state, replace(job, model=replace(job.model, depth=5)), r"model\.depth: before 4, now 5"),
        (state, replace(job, loss="sigmoid"), "loss: before softmax, now sigmoid"),
        (state, replace(job, optimizer=OptimizerConfig(name="sgd")), r"optimizer\.name: before adamw, now sgd"),
        (state, replace(job, ema_decay=0.9), r"ema_decay: before 0\.0, now 0\.9"),
        ({**state, "decoder": {"simplejpeg": "2.0"}}, job, "--data.allow-other-decoder"),
        (state, replace(job, steps=3, schedule=ScheduleConfig()), "has 4 steps already, --steps is 3"),
    ]
    for now, changed, message in table:
        with pytest.raises(UserError, match=message):
            refuse_changes(saved, data_state=now, job=changed)
    allowed = replace(job, data=replace(job.data, allow_other_decoder=True))
    refuse_changes(saved, data_state={**state, "decoder": {"simplejpeg": "2.0"}}, job=allowed)


def test_a_run_of_an_older_version_goes_on_and_a_models_tuples_survive_json() -> None:
    """Fields it did not know are at their defaults; a checkpoint's record is JSON, where tuples are lists."""
    job = with_classes(digits_smoke())
    older = {key: value for key, value in asdict(job.model).items() if key not in ("gelu", "resnet_units")}
    saved = SavedJob(step=4, model=older, loss="softmax", optimizer="adamw", data_state={})
    refuse_changes(saved, data_state={}, job=job)
    with pytest.raises(UserError, match=r"model\.gelu: before tanh, now exact"):
        refuse_changes(saved, data_state={}, job=replace(job, model=replace(job.model, gelu="exact")))
    hybrid = replace(job, model=replace(job.model, patch=2, resnet_units=(1,), image_size=32))
    record = json.loads(json.dumps(asdict(hybrid.model)))
    saved = SavedJob(step=4, model=record, loss="softmax", optimizer="adamw", data_state={})
    refuse_changes(saved, data_state={}, job=hybrid)


def test_more_steps_are_a_decision_of_their_own_and_fewer_are_another_run() -> None:
    job = with_classes(digits_smoke())
    saved = SavedJob(step=4, model=asdict(job.model), loss="softmax", optimizer="adamw", data_state={}, job=asdict(job))
    longer, shorter = replace(job, steps=job.steps + 1), replace(job, steps=job.steps - 1)
    with pytest.raises(UserError, match=rf"steps: before {job.steps}, now {job.steps + 1}\n.*add --extend"):
        refuse_changes(saved, data_state={}, job=longer)
    refuse_changes(saved, data_state={}, job=longer, extend=True)
    for extend in (False, True):
        with pytest.raises(UserError, match=rf"now {job.steps - 1}\n.*or another --run-dir$"):
            refuse_changes(saved, data_state={}, job=shorter, extend=extend)
    other = replace(longer, clip_norm=9.0)
    with pytest.raises(UserError, match=r"\n  clip_norm: before 1\.0, now 9\.0\n"):
        refuse_changes(saved, data_state={}, job=other, extend=True)
    shorter_warmup = replace(longer, schedule=replace(job.schedule, warmup_steps=29))  # as a short run's is scaled
    message = rf"\n  steps: before {job.steps}, now {job.steps + 1}\nThe learning rate .*add --extend"
    with pytest.raises(UserError, match=message):
        refuse_changes(saved, data_state={}, job=shorter_warmup)
    with pytest.raises(UserError, match=rf"now {job.steps + 1}\n  clip_norm: before 1\.0, now 9\.0\n.*add --extend"):
        refuse_changes(saved, data_state={}, job=other)
