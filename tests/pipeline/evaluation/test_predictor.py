"""Predictions have the same logits as an evaluation, for files, Pillow images and pixels of any size."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from PIL.PngImagePlugin import PngInfo

from pipeline.data.config import Share
from pipeline.data.evaluation import evaluation_batches
from pipeline.evaluation.predictor import BATCH, Predictor, load_model
from pipeline.models import ModelConfig, build_model
from pipeline.models.weights.folder import filled_model, open_weights, save_weights
from pipeline.models.weights.usage import Usage
from pipeline.shared_settings import EvaluationTransform
from shards.dataset import open_dataset
from shards.errors import UserError
from shards.reading.samples import read_sample
from tests.rigs.images import image_bytes, png_promising
from tests.rigs.transparent import TRANSPARENT

LABELS = tuple(f"class {number}" for number in range(10))
CROP = EvaluationTransform(mode="central_crop", short_side=40)


def saved(folder: Path, usage: Usage) -> Path:
    """A tiny model with random weights."""
    config = ModelConfig(
        name="vit", image_size=32, patch=16, depth=1, width=8, mlp_width=8, num_heads=2, num_classes=len(LABELS)
    )
    state, generator = build_model(config).state_dict(), torch.Generator().manual_seed(0)
    state = {name: torch.randn(tensor.shape, generator=generator) for name, tensor in state.items()}
    save_weights(folder, config=config, labels=LABELS, tensor=lambda name: state[name], usage=usage)
    return folder


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("weights"), Usage())


@pytest.fixture(scope="module")
def predictor(weights: Path) -> Predictor:
    return load_model(weights, device="cpu")


@pytest.mark.parametrize("transform", [EvaluationTransform(), CROP], ids=lambda t: t.mode)
def test_logits_are_those_of_an_evaluation(tmp_path: Path, digits_url: str, transform: EvaluationTransform) -> None:
    predictor = load_model(saved(tmp_path / "w", Usage(transform=transform)), device="cpu")
    dataset, num = open_dataset(digits_url), 20
    files = [tmp_path / f"{number}.img" for number in range(num)]
    for number, file in enumerate(files):
        file.write_bytes(bytes(read_sample(dataset, number).data or b""))
    share = Share(global_batch=num, rank=0, num_ranks=1)
    batches = evaluation_batches(dataset, batch_size=num, image_size=32, transform=transform, share=share, threads=1)
    batch, _ = next(batches)
    views = [predictor.view(file) for file in files]
    assert torch.equal(torch.from_numpy(np.stack(views)), batch.images)
    with torch.no_grad():
        evaluated = filled_model(open_weights(str(tmp_path / "w")))(batch.images)
    assert torch.equal(predictor.logits(views), evaluated)
    chosen = [prediction[0][0] for prediction in predictor.predict(files)]
    assert chosen == [LABELS[number] for number in evaluated.argmax(dim=1).tolist()]


def test_a_photograph_is_turned_upright_even_if_the_runs_evaluation_did_not(tmp_path: Path) -> None:
    image = Image.fromarray(np.random.default_rng(2).integers(0, 256, size=(40, 60, 3), dtype=np.uint8))
    exif = Image.Exif()
    exif[0x0112] = 6
    image.save(tmp_path / "turned.png", exif=exif)
    image.save(tmp_path / "stored.png")
    for said in (True, False):
        usage = Usage(transform=EvaluationTransform(exif=said))
        predictor = load_model(saved(tmp_path / str(said), usage), device="cpu")
        upright = predictor.view(image.transpose(Image.Transpose.ROTATE_270))
        assert np.array_equal(predictor.view(tmp_path / "turned.png"), upright)
        assert not np.array_equal(predictor.view(tmp_path / "stored.png"), upright)


def test_probabilities_of_softmax_add_up_to_1(predictor: Predictor) -> None:
    logits_BK = torch.tensor([[1.0, 3.0, *[0.0] * 8]])
    ranked = predictor.ranked(logits_BK, top=20)[0]
    assert [label for label, _ in ranked[:3]] == ["class 1", "class 0", "class 2"]  # a tie keeps the classes' order
    assert len(ranked) == 10
    assert sum(probability for _, probability in ranked) == pytest.approx(1)
    assert ranked[0][1] == pytest.approx(torch.softmax(logits_BK, dim=1)[0, 1].item())


def test_probabilities_of_sigmoid_are_each_classs_own(tmp_path: Path) -> None:
    predictor = load_model(saved(tmp_path, Usage(loss="sigmoid")), device="cpu")
    ranked = predictor.ranked(torch.tensor([[4.0, 4.0, *[-4.0] * 8]]), top=3)[0]
    assert [label for label, _ in ranked] == ["class 0", "class 1", "class 2"]
    assert [likely for _, likely in ranked] == pytest.approx([0.982, 0.982, 0.018], abs=1e-3)


def test_one_image_in_every_form(tmp_path: Path, predictor: Predictor) -> None:
    path = tmp_path / "photo.png"
    path.write_bytes(image_bytes(3, height=90, width=50, image_format="PNG"))
    image = Image.open(path)
    forms: list[Any] = [path, str(path), image, np.asarray(image)]
    expected = predictor.predict(path, top=2)
    assert [predictor.predict(form, top=2) for form in forms] == [expected] * 4
    many = predictor.predict(forms * (BATCH // 3), top=2)
    assert [label for prediction in many for label, _ in prediction] == [label for label, _ in expected] * len(many)
    assert predictor.predict([]) == []


def test_an_image_that_is_stored_turned_is_seen_upright(tmp_path: Path, predictor: Predictor) -> None:
    with Image.open(io.BytesIO(image_bytes(4, height=40, width=60, image_format="PNG"))) as image:
        exif = Image.Exif()
        exif[0x0112] = 6
        image.save(tmp_path / "upright.png")
        image.transpose(Image.Transpose.ROTATE_90).save(tmp_path / "turned.png", exif=exif)
    upright = predictor.view(tmp_path / "upright.png")
    assert np.array_equal(predictor.view(tmp_path / "turned.png"), upright)
    with Image.open(tmp_path / "turned.png") as image:
        assert np.array_equal(predictor.view(image), upright)


@pytest.mark.parametrize("kind", ["JPEG", "WEBP", "PNG", "PNG of ImageMagick"])
def test_only_exif_turns_an_image_whether_it_is_a_file_or_pillows(
    tmp_path: Path, predictor: Predictor, kind: str
) -> None:
    """Pillow itself also takes the orientation from XMP, and from the text that ImageMagick writes into a PNG."""
    xmp, exif, text, more = '<rdf:Description tiff:Orientation="6"/>', Image.Exif(), PngInfo(), {}
    exif[0x0112] = 6
    if kind == "PNG":
        text.add_itxt("XML:com.adobe.xmp", xmp)
    elif kind == "PNG of ImageMagick":
        text.add_text("Raw profile type exif", f"\nexif\n{len(exif.tobytes()):8}\n{exif.tobytes().hex()}\n")
    else:
        more = {"xmp": xmp.encode()}
    with Image.open(io.BytesIO(image_bytes(4, height=40, width=60, image_format="PNG"))) as image:
        image.save(tmp_path / "image", kind.split(maxsplit=1)[0], pnginfo=text, **more)
    with Image.open(tmp_path / "image") as image:
        assert ImageOps.exif_transpose(image).size == (40, 60), "Pillow turns it"
    with Image.open(tmp_path / "image") as image:
        image.load()
        said = dict(image.info)
        assert np.abs(predictor.view(image).astype(int) - predictor.view(tmp_path / "image")).max() <= 2
        assert image.info == said


def test_grey_and_transparent_images_are_rgb(predictor: Predictor) -> None:
    grey = Image.new("L", (50, 40), 100)
    assert np.array_equal(predictor.view(grey), np.full((32, 32, 3), 100, dtype=np.uint8))
    assert np.array_equal(predictor.view(Image.new("RGBA", (9, 9), (1, 2, 3, 0)))[0, 0], [255, 255, 255])


@pytest.mark.parametrize("kind", TRANSPARENT)
def test_a_file_and_its_pillow_image_have_the_pixels_of_training(
    tmp_path: Path, predictor: Predictor, kind: str
) -> None:
    data, expected = TRANSPARENT[kind]
    path = tmp_path / "image"
    path.write_bytes(data)
    as_pixels = predictor.view(expected)
    assert np.array_equal(predictor.view(path), as_pixels)
    with Image.open(path) as image:
        if image.mode != "I;16":  # refused: users convert those themselves
            assert np.array_equal(predictor.view(image), as_pixels)


@pytest.mark.parametrize(
    ("image", "message"),
    [
        pytest.param("/nowhere.jpg", "/nowhere.jpg: it cannot be read: No such file", id="no file"),
        pytest.param(np.zeros((8, 8, 3)), r"an image is float64\[8, 8, 3\]; allowed: the path", id="float"),
        pytest.param(np.zeros((2, 8, 8, 3), dtype=np.uint8), "several go into a list", id="a batch"),
        pytest.param(np.zeros((0, 8, 3), dtype=np.uint8), r"an image is uint8\[0, 8, 3\]", id="empty"),
        pytest.param([3], r"an image is int\[\]; allowed", id="a number"),
        pytest.param(Image.new("I;16", (8, 8)), "has the mode 'I;16'; allowed:", id="16 bits"),
    ],
)
def test_what_is_no_image_is_named(predictor: Predictor, image: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        predictor.predict(image)


def test_a_damaged_image_is_named_among_others(tmp_path: Path, predictor: Predictor) -> None:
    good, damaged = tmp_path / "a.jpg", tmp_path / "b.png"
    good.write_bytes(image_bytes(5))
    damaged.write_bytes(png_promising(200, 200))  # its header is valid
    views = predictor.views([good, damaged])
    assert isinstance(views[0], np.ndarray)
    assert isinstance(views[1], UserError)
    with pytest.raises(UserError, match=r"/b\.png: "):
        predictor.predict([good, damaged])


def test_a_top_below_1_and_weights_that_are_damaged(predictor: Predictor) -> None:
    with pytest.raises(UserError, match="top is 0; allowed: 1 or more"):
        predictor.predict("a.jpg", top=0)
    with pytest.raises(UserError, match="logits are not finite"):
        predictor.ranked(torch.tensor([[float("nan")] * 10]), top=1)


def test_one_image_without_finite_logits_does_not_stop_the_others(tmp_path: Path, predictor: Predictor) -> None:
    files = [tmp_path / f"{number}.jpg" for number in range(3)]
    for number, file in enumerate(files):
        file.write_bytes(image_bytes(number))
    logits = predictor.logits([predictor.view(file) for file in files])
    logits[1, 4] = float("nan")

    class Spoilt(Predictor):
        def logits(self, views: Any) -> torch.Tensor:
            return logits[: len(views)]

    spoilt = Spoilt(**vars(predictor))
    first, second, third = spoilt.outcomes(files, top=2)
    assert [first, third] == predictor.ranked(logits[[0, 2]], top=2)
    assert isinstance(second, UserError)
    assert "1.jpg: the model's logits are not finite" in str(second)
    with pytest.raises(UserError, match=r"1\.jpg: the model's logits are not finite"):
        spoilt.predict(files)


def test_weights_and_images_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    saved(tmp_path / "weights", Usage())
    (tmp_path / "a.jpg").write_bytes(image_bytes(1))
    predictor = load_model("~/weights", device="cpu")
    assert predictor.predict("~/a.jpg") == predictor.predict(tmp_path / "a.jpg")
