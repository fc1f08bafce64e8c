"""`patchline evaluate` on packed digits: the scores of a model that is known to say one class."""

import importlib.util
import io
import json
import logging
import math
import random
import shutil
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from jobs import exit_codes
from jobs.data import pack
from jobs.models.evaluate import EvaluateJob, run, say_other_transform, say_weights_used, score_text
from jobs.recipes.pretrain import digits_smoke
from jobs.record import read_record, write_record
from jobs.reports.points import point_of
from pipeline.evaluation.config import EvaluatedData
from pipeline.evaluation.predictor import load_model
from pipeline.evaluation.scores import Scores
from pipeline.models import ModelConfig, build_model
from pipeline.models.conversion.config import Format
from pipeline.models.conversion.convert import save_as
from pipeline.models.weights.folder import save_weights
from pipeline.models.weights.usage import Usage
from pipeline.shared_settings import EvaluationTransform
from shards.config import SubsetConfig
from shards.dataset import open_dataset
from shards.errors import InvalidDataError, UserError
from shards.sources.digits import DigitsSource
from shards.sources.folders import FolderSource
from tests.rigs.datasets import index_rows, packed_folders, packed_with_weights
from tests.rigs.images import class_folders, image_bytes
from tests.rigs.processes import patchline
from tests.rigs.training import STEPS, FinishedRuns, losses, pretrain_words
from tests.rigs.training import run as train

TINY: dict[str, Any] = {"name": "vit", "image_size": 32, "patch": 16, "depth": 1, "width": 8, "mlp_width": 8}
TINY |= {"num_heads": 2, "num_classes": 10}
SAID = 7
FORMATS: dict[Format, str] = {
    "patchline": "ours",
    "timm": "timm",
    "hugging_face": "hugging_face",
    "vision_transformer": "paper.npz",
    "big_vision": "big_vision.npz",
}


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The test split: 359 images."""
    out = str(tmp_path_factory.mktemp("digits") / "test")
    assert pack.run(pack.PackJob(out=out, source=DigitsSource(split="test"), split="test", samples_per_shard=128)) == 0
    return out


def weights_that_say(folder: Path, label: int, **fields: Any) -> str:
    """Saved weights of a model whose head says `label` of every image."""
    config = ModelConfig(**(TINY | fields))
    state = build_model(config).state_dict()
    state["head.bias"][label] = 1.0
    save_weights(folder, config=config, labels=tuple("0123456789"), tensor=lambda name: state[name])
    return str(folder)


def test_scores_are_said_on_standard_output_and_written(tmp_path: Path, digits: str) -> None:
    weights, run_dir = weights_that_say(tmp_path / "weights", SAID), tmp_path / "scores"
    words = ("--weights", weights, "--data.url", digits, "--run-dir", str(run_dir), "--device", "cpu")
    ended = patchline("evaluate", *words)
    assert (ended.code, "Traceback" in ended.errors) == (0, False), ended.errors
    labels = [label for shard in range(3) for row in index_rows(open_dataset(digits), shard) for label in row.labels]
    scores = json.loads((run_dir / "scores.json").read_text())
    about = {"dataset": scores.pop("dataset"), "step": scores.pop("step")}
    assert about == {"dataset": open_dataset(digits).fingerprint, "step": None}  # weights of no run
    assert scores["num_images"] == len(labels) == 359
    share = labels.count(SAID) / 359
    assert scores["accuracy"] == pytest.approx(share, rel=1e-12)
    partition = math.log(9 + math.e)
    assert scores["loss"] == pytest.approx(partition - share, rel=1e-6)
    chance = max(labels.count(label) for label in range(10)) / 359
    assert scores["chance"] == pytest.approx(chance, rel=1e-12)
    second = f"accuracy {share:.4f} (chance {chance:.4f}), loss {scores['loss']:.4f}, 359 images"
    assert scores["mean_per_class"] == pytest.approx(0.1)
    third = f"top-5 {scores['top5']:.4f}, mean per class 0.1000, calibration error {scores['calibration_error']:.4f}"
    assert ended.output == f"{weights} on {digits}\n{second}\n{third}\n"
    assert share < scores["top5"] < 1
    classes = json.loads((run_dir / "classes.json").read_text())
    assert (classes["labels"], classes["classes"]) == ([*"0123456789"], [*"0123456789"])
    assert classes["images"] == [labels.count(label) for label in range(10)]
    assert classes["right"] == [labels.count(SAID) * (label == SAID) for label in range(10)]
    assert classes["confusion"] == [[label, SAID, labels.count(label)] for label in range(10)]
    record = read_record(run_dir / "job.yaml", stage="evaluate", kind=EvaluateJob)
    assert (record.weights, record.data.url) == (weights, digits)
    again = patchline("evaluate", str(run_dir / "job.yaml"), "--run-dir", str(tmp_path / "again"), "--json")
    assert again.code == 0
    assert json.loads(again.output) == scores | {"weights": weights, "data_url": digits}
    assert json.loads((tmp_path / "again" / "scores.json").read_text()) == about | scores


def test_the_run_itself_is_no_place_for_its_scores(tmp_path: Path, digits: str) -> None:
    run_dir = tmp_path / "run"
    write_record(run_dir, stage="pretrain", job=digits_smoke())
    (run_dir / "scores.json").write_text("{}")
    before = {path: path.read_bytes() for path in run_dir.iterdir()}
    job = EvaluateJob(weights=weights_that_say(tmp_path / "w", 3), data=EvaluatedData(url=digits), run_dir=str(run_dir))
    with pytest.raises(UserError, match="has a run of patchline pretrain"):
        run(job)
    assert {path: path.read_bytes() for path in run_dir.iterdir()} == before


def test_answers_that_a_class_map_allows(tmp_path: Path, digits: str) -> None:
    """Of the labels 7 and 8 every answer 7 is right; the others do not count."""
    path = tmp_path / "map.json"
    path.write_text('{"7": "7", "8": ["7", "1"]}')
    weights = weights_that_say(tmp_path / "weights", SAID)
    words = ("--weights", weights, "--data.url", digits, "--class-map", str(path), "--device", "cpu")
    ended = patchline("evaluate", *words)
    assert "accuracy 1.0000" in ended.output, ended.errors
    assert "others without a label that counts" in ended.output
    both = patchline("evaluate", *words, "--real", "real.json")
    assert (both.code, "--class-map and --real do not go together" in both.errors) == (2, True)


def lists_as_published() -> list[list[int]]:
    """Made lists: of each length, as many as in ImageNet-ReaL's real.json."""
    draw = random.Random(0)
    numbers = {1: 39_394, 0: 3_163, 2: 5_408, 3: 1_319, 4: 411, 5: 161, 6: 88, 7: 41, 8: 13, 9: 2}
    lengths = [length for length, number in numbers.items() for _ in range(number)]
    draw.shuffle(lengths)
    return [draw.sample(range(1000), length) for length in lengths]


def published_lists() -> list[list[int]]:
    """The published lists, which timm has a copy of."""
    found = importlib.util.find_spec("timm")
    if found is None or not found.submodule_search_locations:
        pytest.skip("timm, which has a copy of real.json, is not installed")
    path = Path(found.submodule_search_locations[0]) / "data" / "_info" / "imagenet_real_labels.json"
    lists: list[list[int]] = json.loads(path.read_text())
    return lists


@pytest.mark.parametrize("read", [lists_as_published, published_lists])
def test_accuracy_by_imagenet_real(read: Callable[[], list[list[int]]], tmp_path: Path) -> None:
    """The score is that of the example in github.com/google-research/reassessed-imagenet: over images whose list is not
    empty, whether the answer is in the list. Entry 0 is of ILSVRC2012_val_00000001."""
    config = ModelConfig(**TINY | {"num_classes": 1000})
    model, synsets = build_model(config).eval(), tuple(f"n{number:08d}" for number in range(1_440_764, 1_441_764))
    torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(1))
    state = model.state_dict()
    save_weights(tmp_path / "w", config=config, labels=synsets, tensor=lambda name: state[name])
    files = [image_bytes(number, height=32, width=32) for number in range(40)]
    pixels = np.stack([np.array(Image.open(io.BytesIO(data))) for data in files])
    with torch.no_grad():
        best = model(torch.from_numpy(pixels)).topk(5).indices.tolist()
    lists, unused = read(), set(range(50_000))
    assert len(lists) == 50_000
    chosen = []
    for number, five in enumerate(best):  # a list without classes, with the answer, with another of the five, with none
        kinds = (set[int](), {five[0]}, set(five[1:]), set(range(1000)) - set(five))
        wanted, others = kinds[number % 4], set(five) - kinds[number % 4]
        fits = (n for n in sorted(unused) if (wanted & {*lists[n]} if wanted else not lists[n]))
        chosen.append(next(n for n in fits if not others & {*lists[n]}))
        unused.remove(chosen[-1])
        label = lists[chosen[-1]][0] if lists[chosen[-1]] else 7
        path = tmp_path / "val" / synsets[label] / f"ILSVRC2012_val_{chosen[-1] + 1:08d}.JPEG"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(files[number])
    source, out = FolderSource(root=str(tmp_path / "val")), str(tmp_path / "packed")
    assert pack.run(pack.PackJob(out=out, source=source, samples_per_shard=16)) == 0
    (tmp_path / "real.json").write_text(json.dumps(lists))
    words = ("--weights", f"{tmp_path}/w", "--data.url", out, "--real", f"{tmp_path}/real.json", "--device", "cpu")
    ended = patchline("evaluate", *words, "--json")
    assert ended.code == 0, ended.errors
    scores = json.loads(ended.output)
    listed = [(five, lists[n]) for five, n in zip(best, chosen, strict=True) if lists[n]]
    assert (scores["num_images"], scores["num_unlabeled"]) == (len(listed), len(best) - len(listed)) == (30, 10)
    assert scores["accuracy"] == pytest.approx(statistics.fmean(five[0] in own for five, own in listed))
    assert scores["top5"] == pytest.approx(statistics.fmean(not {*five}.isdisjoint(own) for five, own in listed))
    assert (scores["accuracy"], scores["top5"]) == pytest.approx((1 / 3, 2 / 3))


def test_images_without_a_label_are_packed_and_do_not_count_also_in_training(tmp_path: Path) -> None:
    """As in ImageNet-ReaL; the dataset is a sound one, on which one can train."""
    root = class_folders(tmp_path / "images", num_classes=2, images_a_class=4)
    for number in range(3):
        (root / f"of nothing {number}.jpg").write_bytes(image_bytes(number))
    out = str(tmp_path / "packed")
    kept = pack.PackJob(out=out, source=FolderSource(root=str(root)), unlabeled="keep", samples_per_shard=4)
    assert pack.run(kept) == 0
    assert pack.run(replace(kept, out=f"{out} refused", unlabeled="refuse", max_quarantined=0.5)) == 0
    assert [open_dataset(url).num_samples for url in (out, f"{out} refused")] == [11, 8]
    assert patchline("verify", out, "--deep").code == 0
    run_dir = tmp_path / "run"
    other = str(packed_folders(tmp_path / "others", num_classes=2))
    words = pretrain_words(out, run_dir, "--steps", "4", "--evaluation.url", out, "--model.num-classes", "2")
    words += ["--evaluation.also", other, "--loss", "softmax"]
    assert train(words, num_ranks=1, log_dir=tmp_path) == exit_codes.DONE
    ended = patchline("evaluate", "--weights", str(run_dir / "weights"), "--data.url", out, "--json")
    scores = json.loads(ended.output)
    assert (scores["num_images"], scores["num_unlabeled"]) == (8, 3)
    assert scores["accuracy"] in [number / 8 for number in range(9)]
    line = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])
    names = ("accuracy", "top5", "mean_per_class")
    assert [line[f"test_{name}"] for name in names] == [scores[name] for name in names]
    ended = patchline("evaluate", "--weights", str(run_dir / "weights"), "--data.url", other, "--json")
    also = json.loads(ended.output)
    assert also["num_images"] == 10
    assert [line[f"eval/packed/{name}"] for name in names] == [also[name] for name in names]


def test_weights_that_know_fewer_classes_are_refused(tmp_path: Path, digits: str) -> None:
    weights = weights_that_say(tmp_path / "weights", 0, num_classes=3)
    with pytest.raises(
        UserError, match=r"has 7 classes that the model was not trained on, for example '3'.*--class-map"
    ):
        run(EvaluateJob(weights=weights, data=EvaluatedData(url=digits)))


def test_weights_that_say_nothing_are_right_by_chance(tmp_path: Path, digits: str) -> None:
    config = ModelConfig(**TINY)
    state = build_model(config).state_dict()
    with torch.no_grad():
        state["head.weight"].normal_(generator=torch.Generator().manual_seed(1))
    save_weights(tmp_path / "w", config=config, labels=tuple("0123456789"), tensor=lambda name: state[name])
    words = ("--weights", str(tmp_path / "w"), "--data.url", digits, "--run-dir", str(tmp_path / "run"))
    assert patchline("evaluate", *words, "--data.transform.mode", "central_crop", "--device", "cpu").code == 0
    assert 0 <= json.loads((tmp_path / "run" / "scores.json").read_text())["accuracy"] < 0.5
    assert EvaluateJob().data.transform.mode == "resize"


def spoil(folder: str, name: str, value: float) -> None:
    """Overwrites one value of a tensor, as damage or another program would."""
    path = Path(folder) / "model.safetensors"
    tensors = load_file(path)
    tensors[name].view(-1)[0] = value
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        pytest.param("head.bias", math.nan, r"head.bias in the weights at .* has 1 values of 10 that", id="NaN"),
        pytest.param("norm.bias", math.inf, r"norm.bias in the weights at .* has 1 values of 8 that are not", id="inf"),
    ],
)
def test_weights_that_are_not_finite_have_no_score(
    tmp_path: Path, digits: str, name: str, value: float, message: str
) -> None:
    weights = weights_that_say(tmp_path / "weights", SAID)
    spoil(weights, name, value)
    job = EvaluateJob(weights=weights, data=EvaluatedData(url=digits), run_dir=str(tmp_path / "run"), device="cpu")
    with pytest.raises(InvalidDataError, match=message):
        run(job)
    assert not (tmp_path / "run" / "scores.json").exists()


def test_logits_that_are_not_finite_are_no_score(tmp_path: Path, digits: str) -> None:
    """Finite weights can give them: a sum of large products overflows."""
    weights = weights_that_say(tmp_path / "weights", SAID)
    for name in ("norm.weight", "head.weight"):
        tensors = load_file(Path(weights) / "model.safetensors")
        tensors[name].fill_(3e38)
        save_file(tensors, Path(weights) / "model.safetensors")
    job = EvaluateJob(weights=weights, data=EvaluatedData(url=digits), run_dir=str(tmp_path / "run"), device="cpu")
    with pytest.raises(InvalidDataError, match=r"the logits of .* are not finite .NaN or infinite. for images of"):
        run(job)
    assert not (tmp_path / "run" / "scores.json").exists()


def test_an_evaluation_that_fails_leaves_no_scores_of_another(tmp_path: Path, digits: str) -> None:
    """Else the report would show the earlier scores as those of the later job."""
    weights, names = weights_that_say(tmp_path / "weights", SAID), {"scores.json", "classes.json", "examples.json"}
    job = EvaluateJob(weights=weights, data=EvaluatedData(url=digits), run_dir=str(tmp_path / "run"), device="cpu")
    assert run(job) == exit_codes.DONE
    assert {path.name for path in (tmp_path / "run").iterdir()} == names | {"job.yaml"}
    for name in ("norm.weight", "head.weight"):
        tensors = load_file(Path(weights) / "model.safetensors")
        tensors[name].fill_(3e38)
        save_file(tensors, Path(weights) / "model.safetensors")
    with pytest.raises(InvalidDataError, match="are not finite"):
        run(replace(job, loss="sigmoid"))
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"job.yaml"}


def test_scores_that_cannot_be_written(tmp_path: Path, digits: str) -> None:
    weights = weights_that_say(tmp_path / "weights", SAID)
    (tmp_path / "run" / "scores.json").mkdir(parents=True)
    job = EvaluateJob(weights=weights, data=EvaluatedData(url=digits), run_dir=str(tmp_path / "run"), device="cpu")
    with pytest.raises(UserError, match=r"cannot write .*run/scores.json': Is a directory; give another --run-dir"):
        run(job)
    assert not list((tmp_path / "run").glob("*.part"))


def test_weights_of_labels_reach_every_loss(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Of training, of its evaluation and of `evaluate`, and a run keeps the setting."""
    url = str(packed_with_weights(tmp_path / "lists", [f"a|b,{number % 3 / 4}|0.25" for number in range(40)]))
    weighted, plain = tmp_path / "weighted", tmp_path / "plain"
    more = ("--loss", "sigmoid", "--evaluation.url", url, "--steps", "4", "--model.num-classes", "2")
    words = {
        run_dir: pretrain_words(url, run_dir, *more, "--engine.precision", "fp32") for run_dir in (weighted, plain)
    }
    words[weighted].append("--data.label-weights")
    for run_dir, arguments in words.items():
        assert train(arguments, num_ranks=1, log_dir=tmp_path) == exit_codes.DONE
        said = " ".join(capfd.readouterr().err.split())
        assert ("have weights, which are not used: --data.label-weights uses them" in said) == (run_dir == plain)
    assert losses(weighted)[4] != losses(plain)[4]

    of_run = json.loads((weighted / "metrics.jsonl").read_text().splitlines()[-1])["test_loss"]
    config = EvaluatedData(url=url, batch_size=100)
    for used in (True, False):
        job = EvaluateJob(weights=str(weighted / "weights"), data=config, loss="sigmoid", label_weights=used)
        assert run(replace(job, run_dir=str(tmp_path / f"scores-{used}"), device="cpu")) == 0
        found = json.loads((tmp_path / f"scores-{used}" / "scores.json").read_text())["loss"]
        assert (found == pytest.approx(of_run, rel=1e-5)) == used

    assert train(words[weighted][:-1], num_ranks=1, log_dir=tmp_path) == exit_codes.USER_MISTAKE
    assert "data.label_weights: before true, now false" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("own", "is_said"),
    [
        (EvaluationTransform(), False),  # weights of other libraries have it, too: they do not say
        (EvaluationTransform(exif=False), False),
        (EvaluationTransform(mode="central_crop", filter="area", exif=False), True),
    ],
)
def test_images_that_are_prepared_otherwise_than_in_the_run_are_mentioned(
    own: EvaluationTransform, is_said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        say_other_transform("my run", Usage(transform=own), replace(own, exif=True))
        assert caplog.messages == []
        say_other_transform("my run", Usage(transform=own), EvaluationTransform(antialias=True))
    assert ["patchline evaluate 'my run' repeats" in message for message in caplog.messages] == [True] * is_said


@pytest.mark.parametrize(("num_classes", "has_top5"), [(5, False), (6, True)])
def test_top_5_is_said_where_it_can_be_wrong(num_classes: int, has_top5: bool) -> None:
    shares: dict[str, Any] = dict.fromkeys(("accuracy", "top5", "mean_per_class", "calibration_error", "chance"), 0.5)
    scores = Scores(num_images=10, num_unlabeled=0, loss=0.5, **shares)
    said = score_text(EvaluateJob(weights="w"), scores, num_classes=num_classes)
    assert ("top-5" in said) is has_top5
    assert "mean per class 0.5000" in said


def test_a_score_on_what_was_trained_on_is_said_to_be_none(
    finished_runs: FinishedRuns, digits: str, caplog: pytest.LogCaptureFixture
) -> None:
    run_dir, warning = finished_runs.get(1), "the run was trained on this dataset"
    say_weights_used(str(run_dir), scored=open_dataset(digits).fingerprint)
    assert warning not in caplog.text
    say_weights_used(str(run_dir / "weights"), scored=open_dataset(finished_runs.url).fingerprint)
    assert warning in caplog.text


def test_scores_of_a_runs_own_weights_are_kept_in_the_run(
    finished_runs: FinishedRuns, digits: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The same evaluation replaces its scores; another one has a folder of its own. A run that cannot be written to is
    scored all the same."""
    run_dir = shutil.copytree(finished_runs.get(1), tmp_path / "run")
    job = EvaluateJob(weights=str(run_dir), data=EvaluatedData(url=digits), device="cpu")
    part = replace(job, weights=str(run_dir / "weights"), subset=SubsetConfig(count=20))
    for each in (job, job, part):
        assert run(each) == 0
    folders = sorted((run_dir / "scores").iterdir())
    assert [folder.name.rpartition("-")[0] for folder in folders] == [Path(digits).name] * 2
    kept = [json.loads((folder / "scores.json").read_text()) for folder in folders]
    assert sorted(one["num_images"] for one in kept) == [20, 359]
    assert {one["step"] for one in kept} == {STEPS}
    point = point_of(run_dir, name="run")
    assert point.scored_on
    assert {point.scored_on.part, *(one.on.part for one in point.also)} == {"", "subset.count 20"}
    shutil.rmtree(run_dir / "scores")
    (run_dir / "scores").write_text("a file, where the folder should be")
    assert run(job) == 0
    assert "the scores are only printed: " in caplog.text


def test_weights_of_other_libraries_are_used_as_they_are(tmp_path: Path, digits: str) -> None:
    torch.manual_seed(0)
    config = ModelConfig(**TINY)
    state = {name: torch.randn(value.shape) for name, value in build_model(config).state_dict().items()}
    labels, found = tuple("0123456789"), {}
    for written, name in FORMATS.items():
        save_as(written, tmp_path / name, config=config, labels=labels, tensor=lambda name: state[name])
        run_dir = tmp_path / "scores" / name
        data = EvaluatedData(url=digits)
        assert run(EvaluateJob(weights=str(tmp_path / name), data=data, run_dir=str(run_dir), device="cpu")) == 0
        found[written] = json.loads((run_dir / "scores.json").read_text())
        assert load_model(tmp_path / name, device="cpu").labels == labels
    ours = found.pop("patchline")
    assert ours["loss"] > 1
    about = {"dataset": ours.pop("dataset"), "step": ours.pop("step")}
    numbers = {written: {name: x for name, x in each.items() if name not in about} for written, each in found.items()}
    assert numbers == {written: pytest.approx(ours, rel=1e-6) for written in found}


def test_weights_without_a_head_classify_nothing(tmp_path: Path, digits: str) -> None:
    config = ModelConfig(**TINY)
    state = build_model(config).state_dict()
    save_as("timm", tmp_path / "w", config=config, labels=(), tensor=lambda name: state[name])
    tensors = load_file(tmp_path / "w" / "model.safetensors")
    save_file({k: v for k, v in tensors.items() if not k.startswith("head.")}, tmp_path / "w" / "model.safetensors")
    described = json.loads((tmp_path / "w" / "config.json").read_text())
    described["num_classes"] = described["pretrained_cfg"]["num_classes"] = 0
    (tmp_path / "w" / "config.json").write_text(json.dumps(described))
    with pytest.raises(UserError, match="has no head"):
        run(EvaluateJob(weights=str(tmp_path / "w"), data=EvaluatedData(url=digits), device="cpu"))
    assert load_model(tmp_path / "w", device="cpu", classifies=False).config.num_classes == 0


def test_what_a_file_leaves_open_is_asked_of_import(tmp_path: Path, digits: str) -> None:
    config = ModelConfig(**TINY)
    state = build_model(config).state_dict()
    save_as("timm", tmp_path / "w", config=config, labels=(), tensor=lambda name: state[name])
    (tmp_path / "w" / "model.safetensors").rename(tmp_path / "deit_tiny.safetensors")
    with pytest.raises(UserError, match=r"give --pixels imagenet .* \(patchline import .*deit_tiny.* has these flags"):
        run(EvaluateJob(weights=str(tmp_path / "deit_tiny.safetensors"), data=EvaluatedData(url=digits), device="cpu"))
