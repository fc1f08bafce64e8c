"""The points of a comparison, from records and metrics that are written here: what is drawn, joined and told apart."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jobs.compare_facts import point_of
from jobs.recipes import finetune, pretrain
from jobs.record import write_record
from pipeline.training.config import TrainingJob


def written(
    folder: Path,
    lines: Sequence[dict[str, Any]] = ({"test_accuracy": 0.5},),
    *,
    stage: str = "pretrain",
    weights: str = "",
    model: dict[str, Any] | None = None,
    **fields: Any,
) -> Path:
    """A run of digits_smoke or digits_48 whose metrics have these lines, at steps 1, 2 and so on."""
    recipe: TrainingJob = (finetune if stage == "finetune" else pretrain).RECIPES[
        "digits_48" if stage == "finetune" else "digits_smoke"
    ]()
    sized = replace(recipe.model, num_classes=10, **(model or {}))
    job = replace(recipe, model=sized, initial=replace(recipe.initial, weights=weights), **fields)
    folder.mkdir(parents=True, exist_ok=True)
    write_record(folder, stage=stage, job=job)
    metrics = [{"step": step, "loss": 1.0, "epoch": step / 2, **line} for step, line in enumerate(lines, start=1)]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in metrics))
    return folder


@pytest.mark.parametrize(
    ("weights", "has_compute", "reason"),
    [
        ("base", True, ""),
        ("base/weights", True, ""),
        ("base/weights/", True, ""),
        ("base/best", False, "may be of any checkpoint of their run, so its compute is not known"),
        ("base/deep/weights", False, "is not there, so its compute and data are not known"),
    ],
)
def test_only_final_weights_have_the_compute_of_their_run(
    tmp_path: Path, weights: str, has_compute: bool, reason: str
) -> None:
    base = point_of(written(tmp_path / "base"), name="base")
    tuned = point_of(written(tmp_path / "tuned", stage="finetune", weights=f"{tmp_path}/{weights}"), name="tuned")
    assert (tuned.exaflops is not None) is has_compute
    assert tuned.num_images == (None if "deep" in weights else base.num_images)
    assert reason in " ".join(tuned.reasons)
