"""The names and shapes of a BiT ResNet in each dialect, written down, and compared with timm's own reader of
big_transfer's files."""

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from pipeline.models import ModelConfig
from pipeline.models.conversion.npz import Dialect, open_npz, save_npz
from pipeline.models.conversion.sizes import Hints
from shards.errors import UserError
from tests.pipeline.models.conversion.random_weights import BIT, arrays_in, random_model, tensors_of
from tests.pipeline.models.parity import difference, random_images
from tests.pipeline.models.parity import random_model as gentle_model

TENSORFLOW = {
    "resnet/root_block/standardized_conv2d/kernel": (7, 7, 3, 64),
    "resnet/block1/unit01/a/group_norm/gamma": (64,),
    "resnet/block1/unit01/a/proj/standardized_conv2d/kernel": (1, 1, 64, 256),
    "resnet/block2/unit02/b/standardized_conv2d/kernel": (3, 3, 128, 128),
    "resnet/block2/unit02/c/group_norm/beta": (128,),
    "resnet/group_norm/gamma": (512,),
    "resnet/head/conv2d/kernel": (1, 1, 512, 3),
    "resnet/head/conv2d/bias": (3,),
}
FLAX = {
    "params/root_block/conv_root/kernel": (7, 7, 3, 64),
    "params/block1/unit01/gn1/scale": (1, 1, 1, 64),
    "params/block1/unit01/conv_proj/kernel": (1, 1, 64, 256),
    "params/block2/unit02/conv2/kernel": (3, 3, 128, 128),
    "params/block2/unit02/gn3/bias": (1, 1, 1, 128),
    "params/norm-pre-head/scale": (1, 1, 1, 512),
    "params/head/kernel": (512, 3),
    "params/head/bias": (3,),
}


@pytest.mark.parametrize(("dialect", "expected"), [("vision_transformer", TENSORFLOW), ("big_vision", FLAX)])
def test_names_and_shapes(tmp_path: Path, dialect: Dialect, expected: dict[str, tuple[int, ...]]) -> None:
    save_npz(tmp_path / "w.npz", config=BIT, tensor=tensors_of(random_model(BIT)), dialect=dialect)
    shapes = {name: array.shape for name, array in arrays_in(tmp_path / "w.npz").items()}
    assert {name: shapes.get(name) for name in expected} == expected
    # root, three convolutions and three norms per unit, two projections, last norm, head
    assert len(shapes) == 1 + 3 * (3 + 6) + 2 + 2 + 2


def test_timm_reads_our_file(timm: ModuleType, tmp_path: Path) -> None:
    config = ModelConfig(name="bit_r50x1", num_classes=3, resnet_epsilons="timm")
    model = gentle_model(config)
    save_npz(tmp_path / "w.npz", config=config, tensor=tensors_of(model), dialect="vision_transformer")
    other = timm.create_model("resnetv2_50x1_bit", num_classes=3)
    with torch.no_grad():
        other.load_pretrained(str(tmp_path / "w.npz"))
    assert difference(model, other.eval(), random_images(64, 64)) < 2e-5


def test_a_root_alone_is_refused(tmp_path: Path) -> None:
    save_npz(tmp_path / "w.npz", config=BIT, tensor=tensors_of(random_model(BIT)), dialect="big_vision")
    arrays = {name: array for name, array in arrays_in(tmp_path / "w.npz").items() if "unit" not in name}
    np.savez(tmp_path / "root.npz", **arrays)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"has no units .block1/unit01/\.\.\."):
        open_npz(tmp_path / "root.npz", Hints())
