"""Masked patch prediction: colours and loss against NumPy, what is corrupted, gradients, and weights made of it."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from pipeline.models import ModelConfig, ViT, build_model, checkpoint_blocks, shapes_of
from pipeline.models.config import Pooling, without_masked_patches
from pipeline.models.conversion.config import Change
from pipeline.models.conversion.convert import changed, save_as
from pipeline.models.flops import forward_flops, num_parameters
from pipeline.models.masked import (
    NOT_PREDICTED,
    ColourHead,
    colour_names,
    masked_loss,
    masked_targets,
    mean_colours,
    output_names,
)
from pipeline.models.weights.fit import fit_weights
from pipeline.models.weights.folder import Weights, filled_model, open_weights, refuse_no_classifier, save_weights
from shards.errors import UserError

VIT = ModelConfig(
    name="vit",
    image_size=16,
    patch=4,
    depth=2,
    width=16,
    mlp_width=24,
    num_heads=2,
    num_classes=512,
    masked_patches=True,
)
PARTS = replace(VIT, masked_target="parts", num_classes=8192)
PIXELS = replace(VIT, masked_target="pixels", num_classes=48)
TARGETS = [pytest.param(VIT, id="means"), pytest.param(PARTS, id="parts"), pytest.param(PIXELS, id="pixels")]
IMAGES = torch.randint(0, 256, (3, 16, 16, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
MASKED = 16  # the source that stands for [mask], after the 16 patches


def vit(config: ModelConfig = VIT) -> ViT:
    """With a head that is not zero."""
    model = build_model(config, seed=1)
    with torch.no_grad():
        model.head.weight.normal_(generator=torch.Generator().manual_seed(2))
    assert isinstance(model, ViT)
    return model


def own_places() -> torch.Tensor:
    return torch.arange(16).repeat(3, 1)


def colours_by_numpy(images: np.ndarray, side: int) -> np.ndarray:
    """One patch after another, in fractions of the whole range."""
    found = []
    for image in images:
        for top in range(0, image.shape[0], side):
            for left in range(0, image.shape[1], side):
                mean = image[top : top + side, left : left + side].reshape(-1, 3).mean(axis=0) / 255
                red, green, blue = np.minimum(np.floor(mean * 8), 7).astype(int)
                found.append(red * 64 + green * 8 + blue)
    return np.array(found).reshape(len(images), -1)


@pytest.mark.parametrize("side", [4, 8, 16])
def test_mean_colours_are_those_of_numpy(side: int) -> None:
    shaded = (IMAGES.float() * torch.tensor([0.2, 0.6, 1.0])).to(torch.uint8)
    for images in (IMAGES, shaded):
        assert np.array_equal(mean_colours(images, side=side).numpy(), colours_by_numpy(images.numpy(), side))


def test_the_ends_of_the_range_have_a_class() -> None:
    assert mean_colours(torch.full((1, 4, 4, 3), 255, dtype=torch.uint8), side=4).tolist() == [[511]]
    assert mean_colours(torch.zeros(1, 4, 4, 3, dtype=torch.uint8), side=4).tolist() == [[0]]
    assert (len(set(colour_names())), colour_names()[511]) == (512, "red 7 green 7 blue 7")
    assert colour_names()[64 + 16 + 3] == "red 1 green 2 blue 3"


def targets_by_numpy(config: ModelConfig) -> np.ndarray:
    """One patch after another, cut out of the image."""
    side, found = config.stride, []
    for image in IMAGES.numpy():
        for top, left in np.ndindex(image.shape[0] // side, image.shape[1] // side):
            patch = image[top * side : (top + 1) * side, left * side : (left + 1) * side]
            if config.masked_target == "pixels":
                found.append(patch.reshape(-1))
            else:
                found.append(colours_by_numpy(patch[None], side // 4 if config.masked_target == "parts" else side)[0])
    return np.array(found).reshape(len(IMAGES), -1, len(found[0]))


@pytest.mark.parametrize("config", [*TARGETS, pytest.param(replace(PARTS, patch=8), id="parts of 2 x 2 pixels")])
def test_targets_are_those_of_numpy(config: ModelConfig) -> None:
    expected = targets_by_numpy(config)
    assert expected.shape[2] == {"mean": 1, "parts": 16, "pixels": 48}[config.masked_target]
    assert np.array_equal(masked_targets(IMAGES, config).numpy(), expected)


@pytest.mark.parametrize("config", TARGETS)
def test_the_loss_is_numpys_mean_over_what_is_predicted(config: ModelConfig) -> None:
    generator = torch.Generator().manual_seed(5)
    outputs = torch.randn(3, 16, config.num_classes, generator=generator)
    is_predicted = torch.rand(3, 16, 1, generator=generator) < 0.5
    targets = torch.where(is_predicted, masked_targets(IMAGES, config), NOT_PREDICTED)
    x, losses = outputs.double().numpy(), []
    for b, n in np.argwhere(is_predicted.numpy()[:, :, 0]):
        y = targets_by_numpy(config)[b, n]
        if config.masked_target == "pixels":
            losses += ((x[b, n] - (y / 127.5 - 1)) ** 2).tolist()
        else:
            for logits, colour in zip(x[b, n].reshape(-1, 512), y, strict=True):
                losses.append(np.log(np.exp(logits).sum()) - logits[colour])
    assert masked_loss(outputs, targets, target=config.masked_target).item() == pytest.approx(np.mean(losses), rel=1e-6)


@pytest.mark.parametrize("config", TARGETS)
def test_outputs_have_names(config: ModelConfig) -> None:
    names = output_names(config)
    assert len(set(names)) == len(names) == config.num_classes
    last = {"mean": "", "parts": "row 3 column 3 ", "pixels": "row 3 column 3 "}[config.masked_target]
    assert names[-1] == last + ("blue" if config.masked_target == "pixels" else "red 7 green 7 blue 7")


def test_patches_are_taken_from_where_it_is_said() -> None:
    """Image 0 as it is, a masked patch in image 1, another patch in image 2: positions stay where they were."""
    model, sources = vit(), own_places()
    sources[1, 5], sources[2, 7] = MASKED, 3
    assert isinstance(model.head, ColourHead)
    with torch.no_grad():
        model.head.mask.token.normal_(generator=torch.Generator().manual_seed(4))
    positions = model.embed.positions((4, 4))
    assert positions is not None
    plain, found = (model.embed(IMAGES, *more)[0] - positions for more in ((), (model.head.mask, sources)))
    expected = plain.clone()
    expected[1, 1 + 5], expected[2, 1 + 7] = model.head.mask.token[0, 0], plain[2, 1 + 3]
    torch.testing.assert_close(found, expected)
    assert torch.equal(model(IMAGES, None, own_places()), model(IMAGES))
    assert model(IMAGES).shape == (3, 16, 512)
    assert model.features(IMAGES).shape == (3, 16), "few-shot scores read the class token"


@pytest.mark.parametrize(
    ("config", "pooling"), [(VIT, "token"), (VIT, "average"), (PARTS, "token"), (PIXELS, "token")], ids=str
)
def test_gradients_reach_every_parameter(config: ModelConfig, pooling: Pooling) -> None:
    config = replace(config, pooling=pooling)
    sources = own_places()
    sources[:, ::2] = MASKED
    gradients: list[tuple[torch.Tensor, ...]] = []
    for model in (vit(config), vit(config)):
        if gradients:
            checkpoint_blocks(model)
        loss = masked_loss(model(IMAGES, None, sources), masked_targets(IMAGES, config), target=config.masked_target)
        gradients.append(torch.autograd.grad(loss, list(model.parameters())))
        for (name, _), gradient in zip(model.named_parameters(), gradients[-1], strict=True):
            assert gradient.abs().sum() > 0, name
    assert all(map(torch.equal, *gradients)), "recomputed blocks have the same"


@pytest.mark.parametrize("config", TARGETS)
def test_parameters_and_operations_are_counted(config: ModelConfig) -> None:
    assert num_parameters(config) == sum(parameter.numel() for parameter in vit(config).parameters())
    of_head = forward_flops(config) - forward_flops(config, head=False)
    assert of_head == 2 * 16 * 16 * {"mean": 512, "parts": 16 * 512, "pixels": 3 * 4 * 4}[config.masked_target]


def weights_of(model: nn.Module, config: ModelConfig = VIT) -> Weights:
    return Weights(
        where="here",
        config=config,
        labels=output_names(config),
        shapes=shapes_of(config),
        tensor=lambda name: model.get_parameter(name).detach(),
    )


@pytest.mark.parametrize("config", TARGETS)
def test_a_new_head_drops_colours_and_mask(config: ModelConfig) -> None:
    weights, target = weights_of(vit(config), config), replace(without_masked_patches(config), num_classes=5)
    shapes = shapes_of(target)
    tensor = fit_weights(weights, target, initial=lambda name: torch.zeros(shapes[name]), new_head=True)
    assert not [name for name in shapes if "mask" in name]
    assert torch.equal(tensor("blocks.0.mlp.dense1.weight"), weights.tensor("blocks.0.mlp.dense1.weight"))
    assert tensor("head.weight").shape == (5, 16)
    with pytest.raises(UserError):
        fit_weights(weights, target, initial=weights.tensor, new_head=False)


@pytest.mark.parametrize("config", TARGETS)
def test_other_libraries_get_the_backbone_alone(config: ModelConfig, tmp_path: Path) -> None:
    config = replace(config, masked_share=0.15)
    weights = weights_of(vit(config), config)
    with pytest.raises(UserError):
        save_as("timm", tmp_path / "timm", config=config, labels=weights.labels, tensor=weights.tensor)
    target, tensor = changed(weights, Change(new_head=True, num_classes=5))
    assert target == replace(without_masked_patches(config), num_classes=5)
    save_as("timm", tmp_path / "timm", config=target, labels=tuple("abcde"), tensor=tensor)
    assert (tmp_path / "timm" / "model.safetensors").is_file()


@pytest.mark.parametrize("config", TARGETS)
def test_a_folder_keeps_what_it_predicts(config: ModelConfig, tmp_path: Path) -> None:
    model = vit(config)
    tensor = weights_of(model, config).tensor
    save_weights(tmp_path / "w", config=config, labels=output_names(config), tensor=tensor)
    found = open_weights(str(tmp_path / "w"))
    assert (found.config, found.labels) == (config, output_names(config))
    assert torch.equal(filled_model(found)(IMAGES), model(IMAGES))
    with pytest.raises(UserError):
        refuse_no_classifier(found)
