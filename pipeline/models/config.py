"""Sizes of the Vision Transformers ("An Image is Worth 16x16 Words", Dosovitskiy et al., ICLR 2021, Table 1)."""

from dataclasses import dataclass

from shards.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Size:
    """Patch size in pixels, layers, width D, MLP width and heads."""

    patch: int
    depth: int
    width: int
    mlp_width: int
    num_heads: int


SIZES = {
    "vit_b32": Size(patch=32, depth=12, width=768, mlp_width=3072, num_heads=12),
    "vit_b16": Size(patch=16, depth=12, width=768, mlp_width=3072, num_heads=12),
    "vit_l32": Size(patch=32, depth=24, width=1024, mlp_width=4096, num_heads=16),
    "vit_l16": Size(patch=16, depth=24, width=1024, mlp_width=4096, num_heads=16),
    "vit_h14": Size(patch=14, depth=32, width=1280, mlp_width=5120, num_heads=16),
}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A Vision Transformer: a name from the paper, or any size by fields (those given win over the name's).

    `num_classes` 0 stands for "as many as the dataset has". `representation`: the pre-training head's hidden tanh
    layer of width D. `head_bias`: a constant added to every logit in fp32, outside the trained bias (-10 for
    multi-label pre-training, where bf16 steps are too wide). `position_std`: of the initial position embeddings,
    0.02 in the paper; runs of a few hundred steps need more to learn where a patch is. Raises UserError where the
    sizes do not fit together.
    """

    name: str = "vit_b16"
    image_size: int = 224
    num_classes: int = 1000
    patch: int | None = None
    depth: int | None = None
    width: int | None = None
    mlp_width: int | None = None
    num_heads: int | None = None
    representation: bool = False
    dropout: float = 0.0
    head_bias: float = 0.0
    position_std: float = 0.02

    def __post_init__(self) -> None:
        size = self.size
        if self.image_size < size.patch or self.image_size % size.patch:
            lower, upper = (
                self.image_size // size.patch * size.patch,
                -(-self.image_size // size.patch) * size.patch,
            )
            raise UserError(
                f"model.image_size is {self.image_size}, not a multiple of the patch ({size.patch} px); "
                f"take {max(lower, size.patch)} or {max(upper, size.patch)}, or another --model.patch"
            )
        if size.width % size.num_heads:
            raise UserError(f"model.width is {size.width}, not a multiple of model.num_heads = {size.num_heads}")
        if self.num_classes < 0 or not 0.0 <= self.dropout < 1.0:
            raise UserError(
                f"model.num_classes is {self.num_classes} and model.dropout {self.dropout}; "
                "allowed are 0 or more classes (0: as the dataset) and a dropout from 0 to below 1"
            )

    @property
    def size(self) -> Size:
        """The sizes in force: the name's, replaced where a field is given."""
        known = SIZES.get(self.name)
        given = {field: getattr(self, field) for field in Size.__dataclass_fields__}
        merged = {f: v if v is not None else known and getattr(known, f) for f, v in given.items()}
        missing = [f"--model.{field.replace('_', '-')}" for field, value in merged.items() if value is None]
        if missing:
            raise UserError(
                f"model.name is {self.name!r}, which is none of {', '.join(SIZES)}; a model of your own also needs "
                f"{', '.join(missing)}"
            )
        too_small = [f"{field} {value}" for field, value in merged.items() if int(value or 0) < 1]
        if too_small:
            raise UserError(f"model sizes must be 1 or more, these are not: {', '.join(too_small)}")
        return Size(**{field: int(value or 0) for field, value in merged.items()})

    @property
    def grid(self) -> tuple[int, int]:
        """Patches of one image: (height, width)."""
        side = self.image_size // self.size.patch
        return side, side
