"""`patchline import` turns a published file into a weights folder for evaluation and fine-tuning."""

import json
import logging
import os
import socket
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from jobs.models.import_weights import ImportJob, run
from jobs.record import read_record
from pipeline.models import ModelConfig, build_model
from pipeline.models.conversion.npz import save_npz
from pipeline.models.conversion.timm import save_timm
from pipeline.models.weights.folder import filled_model, open_weights
from shards.errors import InvalidDataError, UserError

CONFIG = ModelConfig(name="vit", image_size=16, num_classes=3, patch=4, depth=1, width=12, mlp_width=20, num_heads=2)


@pytest.fixture
def job(tmp_path: Path) -> ImportJob:
    """A small published file."""
    state = build_model(CONFIG).state_dict()
    save_npz(tmp_path / "w.npz", config=CONFIG, tensor=lambda name: state[name], dialect="vision_transformer")
    return ImportJob(path=str(tmp_path / "w.npz"), out=str(tmp_path / "out"))


def test_a_file_becomes_a_folder(job: ImportJob, tmp_path: Path) -> None:
    job = replace(job, run_dir=str(tmp_path / "run"))
    assert run(job) == 0
    weights = open_weights(job.out)
    assert (weights.config, weights.labels) == (CONFIG, ("0", "1", "2"))
    assert filled_model(weights)(torch.zeros(1, 16, 16, 3, dtype=torch.uint8)).shape == (1, 3)
    assert read_record(tmp_path / "run" / "job.yaml", stage="import", kind=ImportJob) == job


def test_sizes_head_and_names_change_on_the_way(job: ImportJob, tmp_path: Path) -> None:
    (tmp_path / "names").write_text("cat\ndog\n")
    names = str(tmp_path / "names")
    assert run(replace(job, image_size=24, patch=8, new_head=True, num_classes=2, labels_file=names)) == 0
    weights = open_weights(job.out)
    assert weights.config.grid == (3, 3)
    assert (weights.config.image_size, weights.config.num_classes, weights.labels) == (24, 2, ("cat", "dog"))
    assert not weights.tensor("head.weight").any()


def test_a_run_stands_for_its_weights(job: ImportJob, tmp_path: Path) -> None:
    """As for all commands that take weights: `import RUN --patch 8` needs no /weights."""
    run(replace(job, out=str(tmp_path / "run" / "weights")))
    assert run(ImportJob(path=str(tmp_path / "run"), out=str(tmp_path / "out"), patch=8)) == 0
    assert open_weights(str(tmp_path / "out")).config == replace(CONFIG, patch=8)


def test_names_that_do_not_fit_the_head_are_dropped_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state, folder = build_model(CONFIG).state_dict(), tmp_path / "timm"
    save_timm(folder, config=CONFIG, labels=("a", "b", "c"), tensor=lambda name: state[name])
    job = ImportJob(path=str(folder), out=str(tmp_path / "out"))
    assert run(job) == 0
    assert open_weights(job.out).labels == ("a", "b", "c")
    assert "called 0 to" not in caplog.text
    config = json.loads((folder / "config.json").read_text()) | {"label_names": ["a", "b"]}
    (folder / "config.json").write_text(json.dumps(config))
    assert run(job, overwrite=True) == 0
    assert open_weights(job.out).labels == ("0", "1", "2")
    assert (
        "names 2 classes, its head has 3: they are called 0 to 2; patchline import takes their names (--labels-file)"
        in caplog.text
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"out": ""}, "--out is missing", id="no out"),
        pytest.param({"path": "gone.npz"}, "no weights at 'gone.npz'", id="no file"),
        pytest.param({"num_classes": 7}, "give --new-head to drop it", id="a head that does not fit"),
        pytest.param(
            {"model": "vit_ti16"},
            r"embedding/kernel is \[4, 4, 3, 12\], the model needs \[16, 16, 3, 192\]",
            id="another model",
        ),
        pytest.param(
            {"new_head": True, "num_classes": 10**12},
            "num_classes is 1000000000000; allowed: 1 to 10,000,000",
            id="absurd",
        ),
        pytest.param({"labels_file": "gone"}, "--labels-file 'gone' cannot be read", id="no names"),
        pytest.param({"image_size": 18}, "--image-size is 18, not a multiple of the patch", id="impossible grid"),
    ],
)
def test_mistakes_leave_nothing_behind(job: ImportJob, change: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        run(replace(job, **change))  # type: ignore[arg-type]
    assert not Path(job.out).exists()


@pytest.mark.parametrize(
    ("names", "message"),
    [("a\nb\n", "has 2 names, 2 different ones; the head has 3"), ("a\na\nb\n", "2 different ones")],
)
def test_names_must_fit_the_head(job: ImportJob, tmp_path: Path, names: str, message: str) -> None:
    (tmp_path / "names").write_text(names)
    with pytest.raises(UserError, match=message):
        run(replace(job, labels_file=str(tmp_path / "names")))


def test_a_folder_is_not_written_over_itself(job: ImportJob) -> None:
    run(job)
    with pytest.raises(UserError, match="where the weights are read from; give another"):
        run(ImportJob(path=job.out, out=job.out))


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("is_link", [False, True])
def test_a_file_is_not_written_over_by_its_own_weights(
    job: ImportJob, tmp_path: Path, name: str, is_link: bool
) -> None:
    """Nor are files beside it; a link counts as being in two folders."""
    run(job)
    source = Path(job.out) / name
    if name.endswith(".bin"):
        torch.save(filled_model(open_weights(job.out)).state_dict(), source)
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "elsewhere" / name
    link.symlink_to(source)
    before = {path.name: path.read_bytes() for path in Path(job.out).iterdir()}
    path = link if is_link else source
    for out in {path.parent, Path(job.out)}:
        with pytest.raises(UserError, match=r"the folder that .* is read from, whose files it replaces; give another"):
            run(ImportJob(path=str(path), out=str(out), num_heads=2))
    assert {path.name: path.read_bytes() for path in Path(job.out).iterdir()} == before
    assert [path.name for path in link.parent.iterdir()] == [name]


def test_what_was_assumed_is_logged_last(job: ImportJob, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        run(job)
    assert caplog.messages[-1].endswith(
        "assumed, as the file does not say: gelu tanh, layer_norm_epsilon 1e-06; to override this: --gelu, "
        "--layer-norm-epsilon"
    )
    caplog.clear()
    with caplog.at_level(logging.INFO):
        run(replace(job, gelu="tanh", layer_norm_epsilon=1e-6))
    assert "assumed, as" not in caplog.text


def test_a_folder_with_other_content_is_left_alone_unless_asked_for(job: ImportJob) -> None:
    assert (run(job), run(job)) == (0, 0)
    (Path(job.out) / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match=r"has other content: thesis\.txt; give another"):
        run(job)
    assert run(replace(job, image_size=24), overwrite=True) == 0
    assert open_weights(job.out).config.image_size == 24
    assert (Path(job.out) / "thesis.txt").read_text() == "years of work"


def test_names_from_a_pipe_or_a_device_are_refused_at_once(job: ImportJob, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (str(tmp_path / "pipe"), "/dev/zero", "a\0b", str(tmp_path)):
        with pytest.raises(UserError, match=r"cannot be read .*; give one name per line"):
            run(replace(job, labels_file=path))


@pytest.mark.parametrize("name", ["loop", "a\0b", "x" * 5000])
@pytest.mark.parametrize("field", ["path", "out"])
def test_paths_that_the_system_refuses(job: ImportJob, tmp_path: Path, name: str, field: str) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(UserError):
        run(replace(job, **{field: str(tmp_path / name)}))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["pipe", "device", "socket", "loop"])
@pytest.mark.parametrize("suffix", [".npz", ".safetensors", ".pth"])
def test_what_is_no_file_is_refused_at_once(job: ImportJob, tmp_path: Path, kind: str, suffix: str) -> None:
    path = tmp_path / f"s{suffix}"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
    else:
        path.symlink_to("/dev/zero" if kind == "device" else path.name)
    with pytest.raises(UserError, match=r"no weights at|cannot be followed"):
        run(replace(job, path=str(path)))


def test_an_output_that_is_a_file(job: ImportJob, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("thesis")
    for overwrite in (False, True):
        with pytest.raises(UserError, match=r"out"):
            run(job, overwrite=overwrite)
    assert (tmp_path / "out").read_text() == "thesis"


def test_values_that_are_not_finite_leave_nothing_behind(job: ImportJob, tmp_path: Path) -> None:
    arrays = dict(np.load(job.path))
    arrays["head/bias"][1] = np.nan
    np.savez(job.path, **arrays)
    with pytest.raises(InvalidDataError, match=r"head/bias in .*w.npz' has 1 values of 3 that are not finite"):
        run(job)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["w.npz"]
