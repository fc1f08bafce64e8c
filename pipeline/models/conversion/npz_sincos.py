"""big_vision's fixed position embeddings (posemb "sincos2d"): its files do not hold them, so they are computed here.

Source: big_vision/models/vit.py (`posemb_sincos_2d`). Shape letters: N patches, D width.
"""

import torch

from pipeline.models.conversion.tensor_file import TensorFile
from shards.errors import UserError

TABLE = "pos_embedding"
_TEMPERATURE = 10_000.0
_IMAGE_SIZE = 224  # px: the file does not say it; big_vision trains its models with this table at 224


def sincos_table(side: int, width: int) -> torch.Tensor:
    """The table (1, N, D), float32, of side x side patches. Raises UserError for a width without such a table."""
    if width % 4 or width < 8:
        raise UserError(
            f"the file has no {TABLE}, and its width {width} has no table of sines; allowed: multiples of 4 from 8 "
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
    """A file without position embeddings, and big_vision's table added to its tensors; not for hybrids."""
    patch, _, _, width = file.shape("embedding/kernel", 4)
    side = max(1, _IMAGE_SIZE // patch)

    def read(name: str) -> torch.Tensor:
        return sincos_table(side, width) if name == TABLE else file.read(name)

    sincos_table(1, width)  # refuses a width without a table before anything is read
    return TensorFile(where=file.where, shapes={**file.shapes, TABLE: (1, side**2, width)}, read=read)
