"""Dense layers that multiply in float8 ("FP8 Formats for Deep Learning", Micikevicius et al., 2022), with torchao.

For every product of a layer, forward and backward, torchao's Float8Linear scales both factors and rounds them to 8
bits. Parameters keep their values and names: DeepSpeed and checkpoints see no difference, and readers of the weights
need no torchao. Only this module loads torchao, and only for a run that asks for it.
"""

import logging
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from typing import Literal

import torch
from torch import nn

from pipeline.models.vit import Block

Scaling = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]
_LEAST_CAPABILITY = (8, 9)  # Ada's; Ada and Hopper were the first GPUs that multiply in float8
_TORCHAO = "0.18."  # as in pyproject.toml
_LAYERS = ("attention.qkv", "attention.out", "mlp.dense1", "mlp.dense2")


def float8_fault(device: torch.device) -> str:
    """Returns why this process cannot multiply in float8 on a device; empty if it can."""
    if device.type != "cuda":
        return "a CPU gains nothing from float8"
    name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    if capability < _LEAST_CAPABILITY:
        least, found = (".".join(map(str, each)) for each in (_LEAST_CAPABILITY, capability))
        return f"{name} has compute capability {found}, and products of float8 begin with {least}"
    found = version("torchao") if find_spec("torchao") else ""
    if found.startswith(_TORCHAO):
        return ""
    what = f"torchao is {found}, not {_TORCHAO}x" if found else "torchao is not installed"
    return f"{what} (pip install 'patchline[float8]')"


def use_float8(model: nn.Module, scaling: Scaling, *, is_emulated: bool = False) -> None:
    """Makes the four dense layers of each block multiply in float8, in place; call it before blocks are compiled.

    `scaling`: torchao's recipe. `is_emulated`: round to float8 and multiply in fp32, which every device can do.
    """
    loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:  # they warn about kernels that are not used here, and about torchao's own calls
        logger.setLevel(logging.ERROR)
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # noqa: PLC0415
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
    # A weight's gradient is a sum over all tokens, whose number must be a multiple of 16; zeros pad it.
    config = replace(Float8LinearConfig.from_recipe_name(scaling), emulate=is_emulated, pad_inner_dim=True)
    for module in model.modules():
        if isinstance(module, Block):
            convert_to_float8_training(module, config=config, module_filter_fn=lambda _, name: name in _LAYERS)
