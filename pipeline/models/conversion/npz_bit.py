"""BiT ResNets in published .npz files: big_transfer's names and big_vision's.

Sources: big_transfer's bit_pytorch/models.py (`load_from`) and big_vision/models/bit_paper.py, which reads both.
TensorFlow appends a number to a layer's name if the name is taken: `standardized_conv2d_17`.
"""

import re
from dataclasses import dataclass

from pipeline.models.config import ModelConfig
from pipeline.models.conversion.layout import (
    Layout,
    TensorMapping,
    as_is,
    changed,
    convolution,
    transposed,
    vector_of_four,
)
from pipeline.models.conversion.sizes import Hints, Usual, bit_config, resnet_of, units_of
from pipeline.models.conversion.tensor_file import TensorFile
from shards.errors import UserError

USUAL = Usual(gelu="tanh", layer_norm_epsilon=1e-6, resnet_epsilons="paper")


@dataclass(frozen=True, kw_only=True)
class BitNames:
    """A dialect: the names are TensorFlow's (`is_tensorflow`) or flax's."""

    prefix: str
    is_tensorflow: bool

    @property
    def root(self) -> str:
        """The first convolution."""
        return "resnet/root_block/standardized_conv2d/kernel" if self.is_tensorflow else "root_block/conv_root/kernel"

    @property
    def head(self) -> str:
        """The classifier's weights."""
        return "resnet/head/conv2d/kernel" if self.is_tensorflow else "head/kernel"


BIG_TRANSFER = BitNames(prefix="", is_tensorflow=True)
BIG_VISION = BitNames(prefix="params/", is_tensorflow=False)


def without_numbers(file: TensorFile) -> TensorFile:
    """TensorFlow's numbered layers under their plain names."""
    return file.renamed(
        {re.sub(r"/standardized_conv2d_\d+/", "/standardized_conv2d/", name): name for name in file.shapes}
    )


def names_in(file: TensorFile) -> BitNames | None:
    """The dialect of a file without its prefix; None if the file is not of a BiT ResNet."""
    return next((names for names in (BIG_TRANSFER, BIG_VISION) if names.root in file.shapes), None)


def config_in(file: TensorFile, names: BitNames, hints: Hints) -> ModelConfig:
    """The configuration, from the shapes of such a file."""
    units = units_of(file.shapes, r"(?:resnet/)?block(\d+)/unit(\d+)/", first=1)
    resnet = resnet_of(units, root_channels=file.shape(names.root, 4)[3])
    if resnet is None:
        raise UserError(f"{file.where!r} has no units (block1/unit01/...) after its root; give a BiT ResNet's file")
    num_classes = file.shape(names.head, 4 if names.is_tensorflow else 2)[-1] if names.head in file.shapes else 0
    return bit_config(resnet, num_classes=num_classes, where=file.where, usual=USUAL, hints=hints)


def layout(config: ModelConfig, names: BitNames) -> Layout:
    """Our tensors in the file."""
    mappings = {"conv_root.weight": convolution(names.root)}
    for stage, num_units in enumerate(config.resnet.units if config.resnet else ()):
        for unit in range(num_units):
            prefix = "resnet/" if names.is_tensorflow else ""
            theirs = f"{prefix}block{stage + 1}/unit{unit + 1:02d}/"
            mappings |= _unit(f"stages.{stage}.{unit}.", theirs, names, is_projected=unit == 0)
    mappings |= _norm("norm.", "resnet/group_norm/" if names.is_tensorflow else "norm-pre-head/", names)
    if config.num_classes and names.is_tensorflow:
        mappings["head.weight"] = changed(names.head, lambda t: t.T[None, None], lambda t: t[0, 0].T)
        mappings["head.bias"] = as_is("resnet/head/conv2d/bias")
    elif config.num_classes:
        mappings |= {"head.weight": transposed(names.head), "head.bias": as_is("head/bias")}
    return mappings


def _unit(ours: str, theirs: str, names: BitNames, *, is_projected: bool) -> dict[str, TensorMapping]:
    """One bottleneck. In TensorFlow its three layers are a, b and c, and the projection is part of a."""
    mappings: dict[str, TensorMapping] = {}
    for number, letter in enumerate("abc", 1):
        if names.is_tensorflow:
            kernel, norm = f"{theirs}{letter}/standardized_conv2d/kernel", f"{theirs}{letter}/group_norm/"
        else:
            kernel, norm = f"{theirs}conv{number}/kernel", f"{theirs}gn{number}/"
        mappings |= _norm(f"{ours}norm{number}.", norm, names)
        mappings[f"{ours}conv{number}.weight"] = convolution(kernel)
    if is_projected:
        name = "a/proj/standardized_conv2d" if names.is_tensorflow else "conv_proj"
        mappings[f"{ours}conv_proj.weight"] = convolution(f"{theirs}{name}/kernel")
    return mappings


def _norm(ours: str, theirs: str, names: BitNames) -> dict[str, TensorMapping]:
    if names.is_tensorflow:
        return {f"{ours}weight": as_is(f"{theirs}gamma"), f"{ours}bias": as_is(f"{theirs}beta")}
    return {f"{ours}weight": vector_of_four(f"{theirs}scale"), f"{ours}bias": vector_of_four(f"{theirs}bias")}
