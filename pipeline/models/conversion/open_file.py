"""Opens a file of named tensors by its suffix: safetensors, PyTorch's or NumPy's .npz."""

from pathlib import Path

from pipeline.models.conversion.npz_file import open_npz_file
from pipeline.models.conversion.safetensors_file import open_safetensors_file
from pipeline.models.conversion.tensor_file import TensorFile
from pipeline.models.conversion.torch_file import open_torch_file
from shards.errors import UserError

SUFFIXES = (".npz", ".safetensors", ".bin", ".pth", ".pt")
_PARALLEL = "module."  # the prefix that PyTorch's DataParallel adds to every name


def open_tensor_file(path: Path) -> TensorFile:
    """The tensors in a file, without DataParallel's prefix. UserError if the file is missing or cannot be read."""
    if path.suffix not in SUFFIXES or not path.is_file():
        raise UserError(f"no weights at {str(path)!r}; allowed: files that end in {', '.join(SUFFIXES)}")
    if path.suffix == ".npz":
        return open_npz_file(path)
    file = open_safetensors_file(path) if path.suffix == ".safetensors" else open_torch_file(path)
    if file.shapes and all(name.startswith(_PARALLEL) for name in file.shapes):
        return file.renamed({name.removeprefix(_PARALLEL): name for name in file.shapes})
    return file
