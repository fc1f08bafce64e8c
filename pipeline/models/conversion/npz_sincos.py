"""big_vision's fixed position embeddings (posemb "sincos2d"), which its files do not hold: computed here.

Source: big_vision/models/vit.py (`posemb_sincos_2d`). Shape letters: N patches, D width.
"""

import torch

from pipeline.models.conversion.tensor_file import TensorFile
from shards.errors import UserError

TABLE = "pos_embedding"
_TEMPERATURE = 10_000.0
_IMAGE_SIZE = 224  # px: the file does not say it, and big_vision's models with this table are trained at it


def table_of(side: int, width: int) -> torch.Tensor:
    """The table (1, N, D), float32, of side x side patches. UserError for a width that it is not defined for."""
    if width % 4 or width < 8:
        raise UserError(
            f"the file has no {TABLE}, and its width {width} has no table of sines; allowed are multiples of 4 from 8 "
            "on: give the file of a model with position embeddings"
        )
    y_N, x_N = (
        axis.flatten().double() for axis in torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    )
    exponent = torch.arange(width // 4, dtype=torch.float64) / (width // 4 - 1)
    omega = 1 / _TEMPERATURE**exponent
    x_Nd, y_Nd = torch.outer(x_N, omega), torch.outer(y_N, omega)
    return torch.cat([x_Nd.sin(), x_Nd.cos(), y_Nd.sin(), y_Nd.cos()], dim=1).float()[None]


def with_table(file: TensorFile) -> TensorFile:
    """A file without position embeddings, with big_vision's table beside its tensors; `file` is of no hybrid."""
    patch, _, _, width = file.shape("embedding/kernel", 4)
    side = max(1, _IMAGE_SIZE // patch)

    def read(name: str) -> torch.Tensor:
        return table_of(side, width) if name == TABLE else file.read(name)

    table_of(1, width)  # refuses what has no table before anything is read
    return TensorFile(where=file.where, shapes={**file.shapes, TABLE: (1, side**2, width)}, read=read)
