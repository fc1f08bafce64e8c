"""metrics.jsonl has floats bit for bit, and nothing beyond the step from which a run resumes."""

import errno
import json
import math
import os
import re
import shutil
import struct
import threading
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator as PluginEventAccumulator
from tensorboard.plugins.hparams.metadata import EXPERIMENT_TAG, SESSION_START_INFO_TAG
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from pipeline.runs.starts import last_step
from pipeline.training.reporting.board import Board
from pipeline.training.reporting.metrics import Metrics, cut_after, grid, read_metrics, tag_of
from pipeline.training.summary import scores_of
from shards.files.local_files import open_local_file
from tests.rigs.small_disk import filled, small_disk


def line(step: int) -> str:
    return json.dumps({"step": step, "loss": step / 7}) + "\n"


@pytest.mark.parametrize(
    ("content", "step", "kept"),
    [
        pytest.param(line(1) + line(2) + line(3), 2, [1, 2], id="later steps are cut"),
        pytest.param(line(1) + line(2), 2, [1, 2], id="nothing to cut"),
        pytest.param(line(1) + line(2), 0, [], id="from scratch"),
        pytest.param(line(1) + '{"step": 2, "lo', 5, [1], id="a half-written line"),
        pytest.param(line(1) + line(2).rstrip("\n"), 5, [1, 2], id="only the line's end is missing"),
        pytest.param(line(1) + "\0" * 30, 5, [1], id="zeros after a power cut"),
        pytest.param(line(1) + line(2) + '"test_loss": 1.5}\n', 5, [1, 2], id="values not yet joined"),
        pytest.param("", 5, [], id="an empty file"),
    ],
)
def test_cutting(tmp_path: Path, content: str, step: int, kept: list[int]) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(content)
    cut_after(path, step=step)
    assert path.read_text() == "".join(line(number) for number in kept)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "bad", [b"\xff\xfe", b"[1]", b"NaN", b"{}", b'{"step": "2"}', b"[" * 200_000, b'{"step": 2, "lo', b'{"loss": 3}']
)
def test_unusable_lines_cost_no_good_ones(tmp_path: Path, bad: bytes, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "metrics.jsonl"
    nothing = b'{"step": 2, "loss": NaN}\n'
    path.write_bytes(bad + b"\n" + line(1).encode() + bad + b"\n" + nothing + line(3).encode() + bad)
    assert [found["step"] for found in read_metrics(tmp_path)] == [1, 2, 3]
    metrics = Metrics(tmp_path, step=2)
    metrics.write(3, {"loss": 0.5})
    metrics.amend(3, {"test_loss": 1.5})
    metrics.close()
    assert path.read_bytes() == line(1).encode() + nothing + b'{"step": 3, "loss": 0.5, "test_loss": 1.5}\n'
    assert caplog.messages == [f"{path}: dropped 3 lines that are no lines of metrics"]


def test_a_folder_that_was_deleted_is_one_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """TensorBoard's thread fails first; its traceback is nobody's business."""
    before = threading.excepthook
    (tmp_path / "run").mkdir()
    metrics = Metrics(tmp_path / "run", step=0)
    metrics._board.flush()  # its thread writes nothing while the folder is removed
    shutil.rmtree(tmp_path / "run")
    metrics.write(1, {"loss": 1.0})
    with pytest.raises(FileNotFoundError):
        metrics._board.flush()
    with pytest.raises(FileNotFoundError):
        metrics.close()
    assert capfd.readouterr().err == ""
    assert threading.excepthook is before


def test_a_full_disk_is_one_error_that_names_the_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """TensorBoard's thread writes, and fails, at once."""
    before = threading.excepthook
    with small_disk(tmp_path / "disk", num_bytes=16 << 10) as folder:
        (folder / "others").write_bytes(bytes(16 << 10))
        with pytest.raises(OSError, match="No space left") as caught:
            Metrics(folder, step=0)
        assert caught.value.filename == str(folder)
    assert capfd.readouterr().err == ""
    assert threading.excepthook is before


def test_lines_that_find_no_room_are_written_later(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with small_disk(tmp_path / "disk", num_bytes=64 << 10) as folder:
        metrics = Metrics(folder, step=0)
        metrics.write(1, {"loss": 0.5})
        filler = filled(folder)
        for step in range(2, 200):  # more than fits into the file's last page
            metrics.write(step, {"loss": step / 7})
        metrics.amend(199, {"test_loss": 1.5})
        with pytest.raises(OSError, match="No space left"):
            metrics.settle()
        filler.unlink()
        metrics.write(200, {"loss": 0.25})
        metrics.settle()
        metrics.close()
        found = read_metrics(folder)
    assert [one["step"] for one in found] == list(range(1, 201))
    assert [one["loss"] for one in found[1:199]] == [step / 7 for step in range(2, 200)]
    assert found[198]["test_loss"] == 1.5
    said = [record.message for record in caplog.records if record.levelname == "WARNING"]
    said = [message for message in said if not message.startswith("TensorBoard")]  # its file is on the full disk, too
    assert len(said) == 2, said
    assert said[0].startswith(f"{folder}/metrics.jsonl cannot be written: No space left on device; its lines are kept")


def test_curves_that_cannot_be_written_are_closed_said_once_and_opened_again(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pipeline.training.reporting.board._FIRST_PAUSE_SECONDS", 0.0)
    with small_disk(tmp_path / "run", num_bytes=64 << 10) as run_dir:
        board = Board(run_dir, first_step=1)
        board.show_job("stage: pretrain", {"steps": 300})
        board.points(1, {"train/loss": 1.0})
        board.flush()
        with suppress(OSError), (run_dir / "others").open("ab", buffering=0) as file:
            while True:
                file.write(bytes(512))
        board.text("filler", "x" * 10_000, 2)  # more than the rest of the file's last page
        board.flush()
        for step in range(3, 6):
            board.points(step, {"train/loss": 9.0})
        assert len(caplog.messages) == 1
        (run_dir / "others").unlink()
        with caplog.at_level("INFO"):
            board.points(6, {"train/loss": 6.0})
        board.close()
        assert len(caplog.messages) == 2
        assert re.search(
            r"^TensorBoard's curves cannot be written \(No space left.*training continues", caplog.messages[0]
        )
        assert caplog.messages[1].startswith("TensorBoard's curves are written again from step 6 on")
        found = board_of(run_dir)
        assert found.Scalars("train/loss")[-1].value == 6.0
        assert 9.0 not in [point.value for point in found.Scalars("train/loss")]
        assert "job/text_summary" in found.Tags()["tensors"], "the job is shown again"
    assert capfd.readouterr().err == ""


def test_a_file_that_is_not_there_is_left_so(tmp_path: Path) -> None:
    cut_after(tmp_path / "metrics.jsonl", step=3)
    assert list(tmp_path.iterdir()) == []


def test_floats_read_back_bit_for_bit_and_a_continued_run_has_each_step_once(tmp_path: Path) -> None:
    values = [0.1 + 0.2, 1e-45, math.pi * 1e300, struct.unpack("<f", struct.pack("<f", 2.3025851))[0]]
    first = Metrics(tmp_path, step=0)
    for step, value in enumerate(values, start=1):
        first.write(step, {"loss": value, "learning_rate": value / 3})
    first.close()
    assert [(found["step"], found["loss"]) for found in read_metrics(tmp_path)] == list(enumerate(values, start=1))
    continued = Metrics(tmp_path, step=2)
    continued.write(3, {"loss": 9.0})
    continued.close()
    assert [found["step"] for found in read_metrics(tmp_path)] == [1, 2, 3]
    assert read_metrics(tmp_path)[-1] == {"step": 3, "loss": 9.0}
    boards = list(tmp_path.glob("events.out.tfevents.*"))
    assert boards
    assert all(board.stat().st_size > 0 for board in boards)


def test_every_line_is_on_disk_at_once(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, step=0)
    metrics.write(1, {"loss": 2.5})
    assert read_metrics(tmp_path) == [{"step": 1, "loss": 2.5}]
    metrics.close()


def test_reading_leaves_out_a_half_written_line(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(line(1) + '{"step": 2')
    assert [found["step"] for found in read_metrics(tmp_path)] == [1]


def test_a_loss_that_is_no_number_is_read_as_such(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, step=0)
    metrics.write(1, {"loss": math.nan, "grad_norm": math.inf})
    metrics.close()
    (found,) = read_metrics(tmp_path)
    assert math.isnan(found["loss"])
    assert found["grad_norm"] == math.inf


def board_of(run_dir: Path) -> EventAccumulator:
    """Everything in a run's TensorBoard files, without sampling."""
    return EventAccumulator(str(run_dir), size_guidance={"tensors": 0, "images": 0}).Reload()


def test_curves_are_in_groups_and_a_continued_run_has_each_step_once(tmp_path: Path) -> None:
    first = Metrics(tmp_path, step=0)
    for step in range(1, 5):
        first.write(step, {"loss": step / 4, "data/bytes": 1e9 * step})
    first.close()
    continued = Metrics(tmp_path, step=2)
    continued.write(3, {"loss": 8.0, "data/bytes": 5.0, "images_per_second": 7.0, "test_accuracy": 0.5})
    continued.close()

    board = board_of(tmp_path)
    curves = {name: [(point.step, point.value) for point in board.Scalars(name)] for name in board.Tags()["scalars"]}
    assert curves == {
        "train/loss": [(1, 0.25), (2, 0.5), (3, 8.0)],
        "work/data/bytes": [(1, 1e9), (2, 2e9), (3, 5.0)],
        "work/perf/images_per_second": [(3, 7.0)],
        "val/accuracy": [(3, 0.5)],
    }


def test_the_last_line_gets_more_values(tmp_path: Path) -> None:
    """The scores of an evaluation that was interrupted and made up for later."""
    metrics = Metrics(tmp_path, step=0)
    for step in (1, 2):
        metrics.write(step, {"loss": step / 7})
    metrics.amend(2, {"test_loss": 0.5})
    metrics.close()
    assert read_metrics(tmp_path) == [{"step": 1, "loss": 1 / 7}, {"step": 2, "loss": 2 / 7, "test_loss": 0.5}]


@pytest.mark.parametrize(
    ("name", "tag"),
    [
        ("loss", "train/loss"),
        ("grad_norm", "train/total_grad_norm"),
        ("learning_rate", "train/lr"),
        ("epoch", "train/num_epochs"),
        ("test_accuracy", "val/accuracy"),
        ("test_loss", "val/loss"),
        ("test_ema_accuracy", "val/ema/accuracy"),
        ("images_per_second", "work/perf/images_per_second"),
        ("step_seconds", "work/perf/step_seconds"),
        ("data_wait_share", "work/perf/data_wait_share"),
        ("data/hedges_per_second", "work/data/hedges_per_second"),
        ("eval/paintings/ema_accuracy", "val/paintings/ema_accuracy"),
        ("fewshot/5_shots", "val/fewshot/5_shots"),
        ("grad_norm/blocks.0", "weights/grad_norm/blocks.0"),
        ("guard/z", "work/guard/z"),
        ("anything", "work/anything"),
    ],
)
def test_tags(name: str, tag: str) -> None:
    assert tag_of(name) == tag


def test_the_job_is_shown_as_text_and_as_hyperparameters_of_the_same_run(tmp_path: Path) -> None:
    for step in (0, 0, 7):  # killed before its first checkpoint, then resumed
        metrics = Metrics(tmp_path, step=step)
        metrics.show_job("stage: pretrain\n", {"steps": 300, "schedule.decay": "cosine"})
        metrics.close()
    board = PluginEventAccumulator(str(tmp_path), tensor_size_guidance={"text": 0}).Reload()
    texts = [(text.step, text.tensor_proto.string_val[0].decode()) for text in board.Tensors("job/text_summary")]
    assert texts == [(step, "```yaml\nstage: pretrain\n```") for step in (1, 8)]
    session = HParamsPluginData.FromString(board.SummaryMetadata(SESSION_START_INFO_TAG).plugin_data.content)
    settings = session.session_start_info.hparams
    assert (settings["steps"].number_value, settings["schedule.decay"].string_value) == (300.0, "cosine")
    experiment = HParamsPluginData.FromString(board.SummaryMetadata(EXPERIMENT_TAG).plugin_data.content).experiment
    shown = [info.name.tag for info in experiment.metric_infos]
    assert shown == ["train/loss", "val/accuracy", "val/loss"]
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []


def test_images_are_shown_in_a_grid_with_their_classes(tmp_path: Path) -> None:
    images = torch.arange(5, dtype=torch.float32)[:, None, None, None].expand(5, 6, 8, 3) * 60.4
    metrics = Metrics(tmp_path, step=3)
    metrics.show_images(4, images, ["cat", "dog", "a|b", "a\n| cat", "dog"])
    metrics.close()
    board = board_of(tmp_path)
    (image,) = board.Images("work/data/images")
    assert (image.step, image.width, image.height) == (4, 4 * 10 - 2, 2 * 8 - 2)
    pixels = np.array(Image.open(BytesIO(image.encoded_image_string)))
    assert pixels[0, [0, 8, 10, 20, 30], 0].tolist() == [0, 255, 60, 121, 181]
    assert pixels[8, [0, 10], 0].tolist() == [242, 255]
    (table,) = board.Tensors("work/data/classes/text_summary")
    assert table.tensor_proto.string_val[0].decode() == "|cat|dog|a\\|b|a \\| cat|\n|---|---|---|---|\n|dog|"


def test_a_grid_of_fewer_images_is_narrower() -> None:
    assert grid(torch.full((2, 3, 3, 3), 300.0)).tolist() == torch.full((3, 8, 3), 255).tolist()


def test_a_read_that_fails_once_ends_no_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails both while the file is looked through and while its lines are copied."""
    path, faults = tmp_path / "metrics.jsonl", iter([errno.EIO, 0, errno.ESTALE, 0])
    path.write_text(line(1) + line(3) + line(2))

    def opened(path: Path) -> BinaryIO:
        if fault := next(faults):
            raise OSError(fault, os.strerror(fault))
        return open_local_file(path)

    monkeypatch.setattr("shards.files.local_files.open_local_file", opened)
    cut_after(path, step=2)
    assert path.read_text() == line(1) + line(2)


def test_a_file_of_more_than_a_gibibyte_is_read_and_cut(tmp_path: Path) -> None:
    """Such as the metrics of three million steps. The zeros are a hole, which takes no room."""
    path = tmp_path / "metrics.jsonl"
    scored = json.dumps({"step": 2, "loss": 0.5, "test_accuracy": 0.25, "test_loss": 1.5}) + "\n"
    with path.open("wb") as file:
        file.write(line(1).encode())
        file.truncate((1 << 30) + 10)
        file.seek(0, os.SEEK_END)
        file.write(b"\n" + scored.encode() + line(3).encode())
    assert [(score.step, score.accuracy) for score in scores_of(tmp_path)] == [(2, 0.25)]
    assert last_step(tmp_path) == 3
    cut_after(path, step=2)
    assert path.read_text() == line(1) + scored


def test_a_start_and_an_amended_line_copy_no_file(tmp_path: Path) -> None:
    """Two copies of the file do not fit on this disk."""
    steps = range(1, 3000)
    with small_disk(tmp_path / "disk", num_bytes=160 << 10) as folder:
        path = folder / "metrics.jsonl"
        path.write_text("".join(line(step) for step in steps) + line(4000))
        cut_after(path, step=3000)
        metrics = Metrics(folder, step=3000)
        metrics.amend(2999, {"test_loss": 1.5})
        metrics.write(3000, {"loss": 0.5})
        metrics.settle()
        metrics.amend(3000, {"checkpoint/failed": 1.0})
        metrics.amend(3000, {"checkpoint/failed": 2.0})
        metrics.settle()
        metrics.close()
        found = read_metrics(folder)
    assert [one["step"] for one in found] == [*steps, 3000]
    assert found[-2:] == [
        {"step": 2999, "loss": 2999 / 7, "test_loss": 1.5},
        {"step": 3000, "loss": 0.5, "checkpoint/failed": 2.0},
    ]


def test_an_amended_line_survives_a_full_disk(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", num_bytes=64 << 10) as folder:
        metrics = Metrics(folder, step=0)
        metrics.write(1, {"loss": 0.5})
        filler = filled(folder)
        many = {f"eval/{number}/accuracy": 0.5 for number in range(300)}  # more than fits into the file's last page
        metrics.amend(1, many)
        assert read_metrics(folder) == [{"step": 1, "loss": 0.5}]
        filler.unlink()
        metrics.settle()
        metrics.close()
        assert read_metrics(folder) == [{"step": 1, "loss": 0.5, **many}]
