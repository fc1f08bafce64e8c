"""A frozen backbone stays what it was, bit for bit, in every checkpoint and under every ZeRO stage, and the head is
trained as by plain PyTorch."""

import shutil
from itertools import islice
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from jobs import exit_codes
from pipeline.checkpoints.manifest import manifest_from_json
from pipeline.data.config import AugmentConfig, DataConfig
from pipeline.data.stream import train_batches
from pipeline.models.loss import classification_loss
from pipeline.models.weights.folder import filled_model, open_weights
from pipeline.training.reporting.metrics import read_metrics
from pipeline.training.settings.job import OptimizerConfig
from pipeline.training.settings.schedule import ScheduleConfig, learning_rate
from pipeline.training.zero.optimizer import build_optimizer, freeze
from tests.rigs.training import FinishedRuns, losses, pretrain_words, run

NUM_STEPS = 4
HEAD = {"head.weight", "head.bias"}


@pytest.fixture(scope="module")
def source(finished_runs: FinishedRuns) -> Path:
    """Weights to start from."""
    return finished_runs.get(1) / "weights"


def words(url: str, run_dir: Path, source: Path, *, stage: int, precision: str) -> list[str]:
    """A run that trains the head on frozen weights, averages them, and saves in its middle."""
    return pretrain_words(
        url,
        run_dir,
        *("--initial.weights", str(source), "--initial.no-new-head", "--optimizer.freeze-backbone"),
        *("--steps", str(NUM_STEPS), "--checkpoint.every-steps", "2", "--schedule.warmup-steps", "1"),
        *("--engine.zero-stage", str(stage), "--engine.precision", precision, "--ema-decay", "0.5"),
        *("--engine.check-gradients", "on", "--clip-norm", "1"),
    )


def unfinish(run_dir: Path) -> None:
    """Makes a finished run one that was killed after its second step was saved."""
    (run_dir / "DONE").unlink()
    shutil.rmtree(run_dir / "weights")
    for folder in run_dir.glob(f"checkpoints/step-{NUM_STEPS:08d}"):
        shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("stage", "precision", "then"),
    [
        pytest.param(1, "fp32", (2, 1), id="1, continued as it was", marks=pytest.mark.long),
        pytest.param(2, "bf16", (1, 3), id="2 in bf16, continued by one rank under 3", marks=pytest.mark.long),
        pytest.param(3, "fp32", (3, 2), id="3, continued by three ranks under 2"),
    ],
)
def test_the_backbone_stays_and_the_head_learns(
    digits_url: str, tmp_path: Path, source: Path, stage: int, precision: str, then: tuple[int, int]
) -> None:
    run_dir, again = tmp_path / "run", tmp_path / "again"
    batch = ("--global-batch", "48", "--data.lanes", "12") if then[0] == 3 else ()
    begun = [*words(digits_url, run_dir, source, stage=stage, precision=precision), *batch]
    assert run(begun, num_ranks=2, log_dir=tmp_path) == exit_codes.DONE
    initial, found = (load_file(folder / "model.safetensors") for folder in (source, run_dir / "weights"))
    assert {name for name in initial if not torch.equal(initial[name], found[name])} == HEAD

    (path,) = run_dir.glob(f"checkpoints/step-{NUM_STEPS:08d}/*/MANIFEST.json")
    manifest = manifest_from_json(path.read_bytes())
    assert manifest.moments == ("average", "exp_avg", "exp_avg_sq")
    assert {name for name, tensor in manifest.tensors.items() if set(tensor.slots) != {"master"}} == HEAD

    shutil.copytree(run_dir, again)
    unfinish(again)
    num_ranks, other_stage = then
    resumed = [*words(digits_url, again, source, stage=other_stage, precision=precision), *batch]
    assert run(resumed, num_ranks=num_ranks, log_dir=tmp_path) == exit_codes.DONE
    after = load_file(again / "weights" / "model.safetensors")
    assert {name for name in initial if not torch.equal(initial[name], after[name])} == HEAD
    for name in HEAD:
        if then == (2, stage):
            assert torch.equal(after[name], found[name]), name
        else:
            torch.testing.assert_close(after[name], found[name], atol=1e-3, rtol=1e-2)


def test_losses_and_norms_are_those_of_plain_torch(digits_url: str, tmp_path: Path, source: Path) -> None:
    """Clipping is by the norm of the head's gradient alone."""
    run_dir = tmp_path / "run"
    assert run(words(digits_url, run_dir, source, stage=3, precision="fp32"), num_ranks=1, log_dir=tmp_path) == 0
    model, optimizer_config = filled_model(open_weights(str(source))), OptimizerConfig(weight_decay=0.05)
    freeze(model, OptimizerConfig(freeze_backbone=True))
    optimizer = build_optimizer(model.named_parameters(), optimizer_config)
    schedule = ScheduleConfig(learning_rate=1e-3, decay="cosine", warmup_steps=1)
    augment = AugmentConfig(min_area=0.75, min_ratio=0.9, max_ratio=1.11, flip=False)
    config = DataConfig(url=digits_url, lanes=8, window_blocks=2, augment=augment)
    expected = []
    listed = tmp_path / "quarantine.jsonl"
    with train_batches(global_batch=32, image_size=32, config=config, quarantine=listed) as batches:
        for batch in islice(batches, NUM_STEPS):
            loss = classification_loss(model(batch.images), batch.labels, name="softmax")
            torch.autograd.backward(loss)
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            norm = torch.nn.utils.clip_grad_norm_(trained, 1.0)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(batch.step, config=schedule, num_steps=NUM_STEPS)
            optimizer.step()
            optimizer.zero_grad()
            expected.append((loss.item(), float(norm)))
    assert list(losses(run_dir).values()) == pytest.approx([loss for loss, _ in expected], abs=2e-5)
    norms = [float(line["grad_norm"]) for line in read_metrics(run_dir)]
    assert norms == pytest.approx([norm for _, norm in expected], rel=1e-3)


def test_a_backbone_from_scratch_is_not_frozen(
    digits_url: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    refused = pretrain_words(digits_url, tmp_path / "run", "--optimizer.freeze-backbone")
    assert run(refused, num_ranks=1, log_dir=tmp_path) == exit_codes.USER_MISTAKE
    assert "its backbone would stay random; give --initial.weights" in " ".join(capfd.readouterr().err.split())
