"""`patchline export` converts a run's weights to each format, and `patchline import` reads them back."""

from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from jobs.export_weights import ExportJob, run
from jobs.import_weights import ImportJob
from jobs.import_weights import run as run_import
from jobs.record import read_record
from pipeline.models import ModelConfig, build_model
from pipeline.models.conversion.config import Format
from pipeline.models.weights import open_weights, save_weights
from shards.errors import UserError

CONFIG = ModelConfig(name="vit_ti16", depth=1, image_size=32, num_classes=3)
LABELS = ("cat", "dog", "Füchsin")


@pytest.fixture
def job(tmp_path: Path) -> ExportJob:
    """A small weights folder."""
    state = build_model(CONFIG).state_dict()
    save_weights(tmp_path / "weights", config=CONFIG, labels=LABELS, tensor=lambda name: state[name])
    return ExportJob(path=str(tmp_path / "weights"), out=str(tmp_path / "out.npz"))


@pytest.mark.parametrize("written", get_args(Format))
def test_every_format_comes_back(job: ExportJob, tmp_path: Path, written: Format) -> None:
    job = replace(job, format=written, image_size=48, run_dir=str(tmp_path / "run"))
    assert run(job) == 0
    assert read_record(tmp_path / "run" / "job.yaml", stage="export", kind=ExportJob) == job
    assert run_import(ImportJob(path=job.out, out=str(tmp_path / "back"))) == 0
    weights = open_weights(str(tmp_path / "back"))
    assert (weights.config.size, weights.config.image_size) == (CONFIG.size, 48)
    keeps_names = written not in ("vision_transformer", "big_vision")
    assert weights.labels == (LABELS if keeps_names else ("0", "1", "2"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"out": ""}, "--out is missing", id="no out"),
        pytest.param({"path": "gone"}, "no weights at 'gone'.*patchline import", id="no weights"),
        pytest.param({"num_classes": 7}, "give --new-head to drop it", id="a head that does not fit"),
        pytest.param({"out": "folder", "format": "big_vision"}, "is a file that ends in .npz", id="npz"),
    ],
)
def test_mistakes_leave_nothing_behind(job: ExportJob, change: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        run(replace(job, **change))  # type: ignore[arg-type]
    assert not Path(job.out).exists()


def test_weights_are_not_written_over_themselves(job: ExportJob) -> None:
    with pytest.raises(UserError, match="where the weights are read from; give another"):
        run(replace(job, out=job.path))


@pytest.mark.parametrize("written", get_args(Format))
def test_the_same_again_is_no_fault_and_anything_else_is_refused_unless_asked_for(
    job: ExportJob, written: Format
) -> None:
    job = replace(job, format=written)
    other = replace(job, image_size=48)
    assert (run(job), run(job)) == (0, 0)
    with pytest.raises(UserError, match=r"has other content: .*--overwrite"):
        run(other)
    assert run(job) == 0  # it is unchanged
    assert run(other, overwrite=True) == 0
    assert run(other) == 0
