"""Opens a file of named tensors by its suffix: safetensors, PyTorch's or NumPy's .npz."""

from pathlib import Path

from pipeline.models.conversion.config import Take
from pipeline.models.conversion.npz_file import open_npz_file
from pipeline.models.conversion.safetensors_file import open_safetensors_file
from pipeline.models.conversion.tensor_file import TensorFile, bare_name
from pipeline.models.conversion.torch_file import open_torch_file
from shards.errors import UserError

SUFFIXES = (".npz", ".safetensors", ".bin", ".pth", ".pt", ".ckpt", ".pth.tar")
# The first tensor of timm's ViTs. What stands before it is the name of a training script for the model.
_FIRST = ".patch_embed.proj.weight"


def open_tensor_file(path: Path, *, take: Take | None = None) -> TensorFile:
    """The tensors in a file, without the prefixes that training scripts add. `take`: which ones of a PyTorch file
    that holds the raw and the averaged weights. UserError if the file is missing or cannot be read."""
    if not path.name.endswith(SUFFIXES) or not path.is_file():
        raise UserError(f"no weights at {str(path)!r}; allowed: files that end in {', '.join(SUFFIXES)}")
    if take and path.suffix in (".npz", ".safetensors"):
        raise UserError(f"{str(path)!r} holds one set of weights and does not say which; leave out --take")
    if path.suffix == ".npz":
        return open_npz_file(path)
    if path.suffix == ".safetensors":
        return without_prefixes(open_safetensors_file(path))
    return without_prefixes(open_torch_file(path, take=take))


def without_prefixes(file: TensorFile) -> TensorFile:
    """The same tensors without such prefixes. UserError if two would then have one name."""
    names: dict[str, str] = {}
    firsts = [name for name in file.shapes if name.endswith(_FIRST)]
    if len(firsts) > 1:
        models = ", ".join(sorted(name.removesuffix(_FIRST[1:]) for name in firsts))
        raise UserError(f"{file.where!r} holds several models, {models}; save one of them alone")
    prefix = bare_name(firsts[0]).removesuffix(_FIRST[1:]) if firsts else ""
    for name in file.shapes:
        bare = bare_name(name).removeprefix(prefix)
        if bare in names:
            raise UserError(f"{names[bare]} and {name} in {file.where!r} would both be {bare}; save one of them alone")
        names[bare] = name
    return file.renamed(names)
