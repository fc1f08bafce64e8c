"""The configuration of a model, and the sizes of known models.

Most sizes come from "An Image is Worth 16x16 Words" (Dosovitskiy et al., ICLR 2021), Table 1 and section 4.1. Ti, S,
B/8, R26 and R come from "How to train your ViT?" (AugReg; Steiner et al., 2021) and vision_transformer's
configs/models.py. The names and units of the ResNets are BiT's ("Big Transfer", Kolesnikov et al., 2020), but R18 and
R34 come from "Deep Residual Learning for Image Recognition" (He et al., 2016, Table 1). g/14 and G/14, which pool by
attention, come from "Scaling Vision Transformers" (Zhai et al., 2022, Table 2) and big_vision's vit.py. A hybrid's
patch is measured in cells of the ResNet's feature map; it is 1 x 1 in the paper.

The options that published weights of later models need (`mlp`, the norms, the rotary positions) name their source at
the field.
"""

from dataclasses import dataclass, fields, replace
from typing import Annotated, Literal

from shards.config_values import Range, refuse_wrong_values, shown_value
from shards.errors import UserError

Pooling = Literal["token", "average", "attention"]
Position = Literal["none", "learned_1d", "learned_2d", "relative", "sincos2d", "rope2d", "learned_rope2d"]
PositionAt = Literal["input", "layers", "layers_shared"]
BranchRates = Literal["rising", "uniform"]
Gelu = Literal["tanh", "exact", "quick"]
MlpKind = Literal["plain", "swiglu"]
NormKind = Literal["layernorm", "rmsnorm"]
InnerNorms = Literal["none", "mlp", "both"]
LastNorm = Literal["tokens", "pooled", "none"]
RotaryPlaces = Literal["from_zero", "from_one", "centred"]
AttentionKind = Literal["global", "axial"]
ResNetEpsilons = Literal["paper", "timm"]
Mode = Literal["paper", "bicubic", "timm"]  # how position embeddings are resampled
ModeOrNone = Literal["paper", "bicubic", "timm", "none"]  # none: embeddings of another grid get initial values
MaskedTarget = Literal["mean", "parts", "pixels"]
MEAN_COLOURS = 512  # classes of masked patch prediction: 3 bits of each channel
PARTS_PER_SIDE = 4  # a patch is cut into 4 x 4 parts if the colour of each part is predicted
# Upper limits for the sizes of a model. They are far above the sizes of any published model, and bound what a damaged
# file or a typing error can ask for.
MOST_LAYERS, MOST_STAGES, MOST_PIXELS, MOST_CLASSES, MOST_WIDTH = 1_000, 8, 16_384, 10_000_000, 65_536
MOST_REGISTERS = 1_024
_MOST_UNSKIPPED = 0.1


@dataclass(frozen=True, kw_only=True)
class Size:
    """The sizes of a transformer: patch size in pixels (in a hybrid: in cells), layers, width D, MLP width and
    heads."""

    patch: int
    depth: int
    width: int
    mlp_width: int
    num_heads: int


@dataclass(frozen=True, kw_only=True)
class ResNetSize:
    """The sizes of a ResNet: the units of each stage, and how many times wider it is (the 2 of R50x2). Without stages,
    it is the root alone.

    A unit is a bottleneck or, if `is_basic`, two 3x3 convolutions, as in ResNet-18 and 34.
    """

    units: tuple[int, ...]
    factor: int = 1
    is_basic: bool = False

    @property
    def num_halvings(self) -> int:
        """The number of times that the size of the feature map is halved: twice by the root, once by each stage after
        the first."""
        return max(2, 1 + len(self.units))

    @property
    def stride(self) -> int:
        """The side in pixels of a cell of the last feature map."""
        return int(2**self.num_halvings)

    @property
    def root_width(self) -> int:
        """The number of channels after the root convolution."""
        return 64 * self.factor

    @property
    def width(self) -> int:
        """The number of channels of the last feature map."""
        if not self.units:
            return self.root_width
        return int((1 if self.is_basic else 4) * self.root_width * 2 ** (len(self.units) - 1))


SIZES = {
    "vit_b32": Size(patch=32, depth=12, width=768, mlp_width=3072, num_heads=12),
    "vit_b16": Size(patch=16, depth=12, width=768, mlp_width=3072, num_heads=12),
    "vit_l32": Size(patch=32, depth=24, width=1024, mlp_width=4096, num_heads=16),
    "vit_l16": Size(patch=16, depth=24, width=1024, mlp_width=4096, num_heads=16),
    "vit_h14": Size(patch=14, depth=32, width=1280, mlp_width=5120, num_heads=16),
    "vit_ti16": Size(patch=16, depth=12, width=192, mlp_width=768, num_heads=3),
    "vit_s16": Size(patch=16, depth=12, width=384, mlp_width=1536, num_heads=6),
    "vit_s32": Size(patch=32, depth=12, width=384, mlp_width=1536, num_heads=6),
    "vit_b8": Size(patch=8, depth=12, width=768, mlp_width=3072, num_heads=12),
    "vit_g14": Size(patch=14, depth=40, width=1408, mlp_width=6144, num_heads=16),
    "vit_bigg14": Size(patch=14, depth=48, width=1664, mlp_width=8192, num_heads=16),
    # ViT-b/32 of the paper's Figure 4: "ViT-B with all hidden dimensions halved". Whether it keeps B's number of heads
    # is [unverified]; with 6 it would be S/32.
    "vit_b32_half": Size(patch=32, depth=12, width=384, mlp_width=1536, num_heads=12),
}
SIZES |= {f"r50_{name}": replace(SIZES[name], patch=1) for name in ("vit_b16", "vit_b32", "vit_l16", "vit_l32")}
SIZES["r26_vit_s32"] = replace(SIZES["vit_s16"], patch=1)
SIZES["r_vit_ti16"] = replace(SIZES["vit_ti16"], patch=8)

# /16: a ResNet-50 without stage 4, whose units are added to stage 3; /32: a whole ResNet-50 (section 4.1).
HYBRID_RESNETS = {
    "r50_vit_b16": ResNetSize(units=(3, 4, 9)),
    "r50_vit_b32": ResNetSize(units=(3, 4, 6, 3)),
    "r50_vit_l16": ResNetSize(units=(3, 4, 9)),
    "r50_vit_l32": ResNetSize(units=(3, 4, 6, 3)),
    "r26_vit_s32": ResNetSize(units=(2, 2, 2, 2)),
    # Published as R+Ti/16, with the remark that the root downscales by 2. The root also pools in the published code and
    # in timm, so it downscales by 4, and a patch of 8 cells covers 32 px.
    "r_vit_ti16": ResNetSize(units=()),
}
BIT_RESNETS = {
    "bit_r50x1": ResNetSize(units=(3, 4, 6, 3)),
    "bit_r50x2": ResNetSize(units=(3, 4, 6, 3), factor=2),
    "bit_r101x1": ResNetSize(units=(3, 4, 23, 3)),
    "bit_r152x1": ResNetSize(units=(3, 8, 36, 3)),
    "bit_r152x2": ResNetSize(units=(3, 8, 36, 3), factor=2),
    "bit_r152x4": ResNetSize(units=(3, 8, 36, 3), factor=4),
    "bit_r200x3": ResNetSize(units=(3, 24, 36, 3), factor=3),
    "bit_r18x1": ResNetSize(units=(2, 2, 2, 2), is_basic=True),
    "bit_r34x1": ResNetSize(units=(3, 4, 6, 3), is_basic=True),
}
RESNETS = HYBRID_RESNETS | BIT_RESNETS
NAMES = (*SIZES, *BIT_RESNETS)
SMOKE = "_smoke"  # ends the name of a tiny model, such as vit_h14_smoke, which has far fewer parameters than vit_h14


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A model: a name, whose sizes are known, or any sizes. Fields that are given override the sizes of the name.

    Raises UserError if the sizes do not fit together.
    """

    name: str = "vit_b16"
    """Model from the paper, such as vit_b16, vit_l16, vit_h14, r50_vit_b16 or bit_r50x1; any other name needs the sizes
    below."""
    image_size: Annotated[int, Range(1, MOST_PIXELS)] = 224
    """Height and width of the model's images in pixels; a multiple of the patch."""
    num_classes: Annotated[int, Range(0, MOST_CLASSES, zero="as many as the dataset has")] = 1000
    """Classes of the head; 0: the dataset's number."""
    patch: Annotated[int, Range(1, MOST_PIXELS)] | None = None
    """Height and width of a patch in pixels (in a hybrid: in cells of the ResNet's feature map)."""
    depth: Annotated[int, Range(1, MOST_LAYERS)] | None = None
    """Transformer layers."""
    width: Annotated[int, Range(1, MOST_WIDTH)] | None = None
    """Width of a token (D in the paper)."""
    mlp_width: Annotated[int, Range(1, 16 * MOST_WIDTH)] | None = None
    """Width of an MLP's hidden layer."""
    num_heads: Annotated[int, Range(1, MOST_WIDTH)] | None = None
    """Attention heads per layer; must divide the width."""
    resnet_units: tuple[Annotated[int, Range(1, MOST_LAYERS)], ...] | None = None
    """Units in each stage of the ResNet (hybrids and BiT), such as 3 4 6 3; a hybrid may have the root alone."""
    resnet_factor: Annotated[int, Range(1, 64)] | None = None
    """How many times wider the ResNet is (the 2 of R50x2)."""
    pooling: Pooling = "token"
    """token: the class token's output; average: no class token, the mean of all patches after the last norm;
    attention: no class token, a learned query that attends to all patches after the last norm, then an MLP (MAP)."""
    representation: bool = False
    """Add a hidden tanh layer of width D before the classifier, as in the paper's pre-training head."""
    position: Position = "learned_1d"
    """Position embeddings (appendix D.4): none, learned_1d, learned_2d (a table for columns and one for rows, D/2
    each), or relative (in every layer's attention, for the distance between two tokens); or sincos2d (sines and cosines
    of the column and the row, which are not learned: big_vision's plain ViT), or rope2d (rotary: every layer turns
    queries and keys by angles of the column and the row: RoPE-Axial), or learned_rope2d (learned_1d and rope2d
    together: EVA-02)."""
    position_at: PositionAt = "input"
    """Where learned position embeddings are added: input (once), layers (before each layer, its own), or layers_shared
    (before each layer, the same); appendix D.4."""
    dropout: Annotated[float, Range(0, below=1)] = 0.0
    """Dropout rate, from 0 to below 1."""
    stochastic_depth: Annotated[float, Range(0, below=1, zero="off")] = 0.0
    """Rate at which images leave out the branches of the last block in training (timm's drop_path_rate)."""
    stochastic_depth_rates: BranchRates = "rising"
    """With stochastic depth, the rates of the other blocks: rising (in a straight line from 0 at the first block, as in
    timm) or uniform (that of the last block, as in DeiT III)."""
    head_bias: float = 0.0
    """Constant added to every logit in fp32, outside the trained bias (-10 for multi-label pre-training, where bf16
    steps are too wide)."""
    position_std: Annotated[float, Range(0)] = 0.02
    """Standard deviation of the initial position embeddings, 0.02 in the paper; a run of a few hundred steps needs a
    larger one to learn where patches are."""
    head_std: Annotated[float, Range(0)] = 0.0
    """Standard deviation of the head's initial matrix: 0 (a matrix of zeros) in the paper, 0.02 in timm and DeiT. LAMB
    needs a positive one, since its trust ratio lets a matrix grow by a share of its own norm only."""
    layer_norm_epsilon: Annotated[float, Range(above=0)] = 1e-6
    """Epsilon of every LayerNorm or RMSNorm: 1e-6 in the paper's code and timm, 1e-12 for weights from Hugging Face."""
    gelu: Gelu = "tanh"
    """Form of the GELU: tanh (the paper's code), exact (timm, Hugging Face), or quick (x times the sigmoid of 1.702 x:
    OpenAI's CLIP)."""
    resnet_epsilons: ResNetEpsilons = "paper"
    """Epsilons of the ResNet's norms, as in the paper's code or in timm."""
    masked_patches: bool = False
    """Pre-train without labels: half of the patches are corrupted, and the head predicts the mean colour of each (512
    classes; appendix B.1.2)."""
    layer_scale: Annotated[float, Range(0, zero="off")] = 0.0
    """Initial value of LayerScale, a learned factor for each channel of what attention and MLP add (CaiT; 1e-4 in
    DeiT-III, 1e-5 in DINOv2); 0: off."""
    registers: Annotated[int, Range(0, MOST_REGISTERS, zero="none")] = 0
    """Register tokens ("Vision Transformers Need Registers", which takes 4): learned tokens after the class token,
    without a position, whose output is not used."""
    distillation_token: bool = False
    """A second learned token after the class token, with a position of its own, and a second head that reads it (DeiT).
    With a teacher, the class token's head learns the labels and this head learns the teacher. Without one, and in
    evaluations and predictions, the logits are the mean of both heads'."""
    qk_norm: bool = False
    """Normalise the queries and keys of each head with the model's kind of norm, which keeps attention from growing too
    sharp in large models (ViT-22B, whose norms are RMSNorms)."""
    attention: AttentionKind = "global"
    """global: each token attends to all. axial: each layer is two blocks, of which the first attends along the rows of
    patches, the second along the columns; without a class token (appendix D.6)."""
    masked_target: MaskedTarget = "mean"
    """What masked_patches predicts of each patch: mean (its mean colour, --model.num-classes 512), parts (the mean
    colours of 4 x 4 parts, 8192), or pixels (the values of all pixels, 3 for each, by mean squared error)."""
    masked_share: Annotated[float, Range(above=0, below=1)] = 0.5
    """Share of each image's patches that masked_patches corrupts, rounded down: 0.5 in the paper, 0.15 in BERT."""
    mlp: MlpKind = "plain"
    """plain: the GELU of one dense layer. swiglu: the SiLU of one dense layer times another, both of width mlp_width
    ("GLU Variants Improve Transformer", Shazeer, 2020; DINOv2's and DINOv3's largest models, EVA-02)."""
    inner_norms: InnerNorms = "none"
    """A norm in front of the last dense layer of each MLP (mlp), and also of each attention (both), as in EVA-02
    and BEiT-3, after "Foundation Transformers" (Wang et al., 2022)."""
    norm: NormKind = "layernorm"
    """Every norm of the Transformer: layernorm, or rmsnorm, which divides by the root of the mean square and has a
    scale alone ("Root Mean Square Layer Normalization", Zhang and Sennrich, 2019), as in AIMv2."""
    patch_norm: bool = False
    """A norm of each embedded patch, before positions are added, as in AIMv2."""
    first_norm: bool = False
    """A norm of all tokens in front of the first layer, as in CLIP."""
    last_norm: LastNorm = "tokens"
    """What the norm after the last layer is of: tokens (of each token, before the pooling: the paper), pooled (of
    the mean of the patches: timm's fc_norm, after BEiT), or none (no such norm: RADIO)."""
    rotary_temperature: Annotated[float, Range(above=1)] = 100.0
    """Rotary positions turn by frequencies from 1 down to almost 1 / this number: 100 in RoPE-ViT and DINOv3, 10,000 in
    EVA-02."""
    rotary_places: RotaryPlaces = "from_zero"
    """Where rotary positions place patches along each axis: from_zero (0, 1, 2, ...), from_one (1, 2, 3, ...:
    Perception Encoder), or centred (the centres of patches on an axis from -2 pi to 2 pi: DINOv3)."""
    rotary_grid: Annotated[int, Range(0, MOST_PIXELS, zero="the model's own")] = 0
    """Side in patches of the grid to which rotary positions of an image of any size are stretched, which is that of
    pre-training in EVA-02 (16). With 0, images of model.image_size are not stretched, and others are stretched to the
    grid of these."""

    def __post_init__(self) -> None:
        if isinstance(self.resnet_units, list):  # JSON turns a tuple into a list
            object.__setattr__(self, "resnet_units", tuple(self.resnet_units))
        refuse_wrong_values(self, where="model.")
        if self.resnet_units is not None and not self.is_bit <= len(self.resnet_units) <= MOST_STAGES:
            raise UserError(
                f"model.resnet_units is {shown_value(self.resnet_units)}; allowed: the units of {int(self.is_bit)} to "
                f"{MOST_STAGES} stages, such as 3 4 6 3"
            )
        if self.is_bit:
            self._refuse_fields_of_transformers()
        else:
            self._refuse_misfits()

    @property
    def is_bit(self) -> bool:
        """True for BiT's ResNets, which have no transformer."""
        return self.name.removesuffix(SMOKE) in BIT_RESNETS

    @property
    def size(self) -> Size:
        """The transformer's sizes: the name's sizes, overridden by the fields that are given.

        Raises ValueError for BiT, which has no transformer, and UserError if a size is neither known nor given.
        """
        if self.is_bit:
            raise ValueError(f"{self.name} is a ResNet, it has no transformer")
        known = SIZES.get(self.name)
        given = {field: getattr(self, field) for field in Size.__dataclass_fields__}
        merged = {f: v if v is not None else known and getattr(known, f) for f, v in given.items()}
        missing = [f"--model.{field.replace('_', '-')}" for field, value in merged.items() if value is None]
        if missing:
            raise UserError(
                f"model.name is {self.name!r}, which is none of {', '.join(NAMES)}; a model of your own also needs "
                f"{', '.join(missing)}"
            )
        return Size(**{field: int(value or 0) for field, value in merged.items()})

    @property
    def resnet(self) -> ResNetSize | None:
        """The ResNet of a hybrid or of BiT; None for a plain Vision Transformer. Raises UserError for a factor without
        a ResNet."""
        known = RESNETS.get(self.name.removesuffix(SMOKE))
        units = self.resnet_units if self.resnet_units is not None else known.units if known else None
        if units is None:
            if self.resnet_factor is not None:
                raise UserError("model.resnet_factor is given without a ResNet; also give --model.resnet-units")
            return None
        factor = self.resnet_factor if self.resnet_factor is not None else known.factor if known else 1
        return ResNetSize(units=units, factor=factor, is_basic=known is not None and known.is_basic)

    @property
    def stride(self) -> int:
        """Height and width in pixels of the area of one token (in BiT: of one cell of the last feature map)."""
        from_resnet = self.resnet.stride if self.resnet else 1
        return from_resnet if self.is_bit else from_resnet * self.size.patch

    @property
    def grid(self) -> tuple[int, int]:
        """The grid of patches of an image: (height, width)."""
        side = self.image_size // self.stride
        return side, side

    @property
    def num_corrupted_patches(self) -> int:
        """The number of patches per image that masked patch prediction corrupts."""
        # In binary, a share such as 0.29 is slightly less, so that 100 times the share is below 29.
        return int(self.masked_share * self.grid[0] * self.grid[1] + 1e-6)

    @property
    def num_blocks(self) -> int:
        """The number of transformer blocks (attention and MLP): one per layer, or two if attention is axial."""
        return self.size.depth * (2 if self.attention == "axial" else 1)

    @property
    def branch_rates(self) -> tuple[float, ...]:
        """For each block, the share of images that skip a branch in training (stochastic depth)."""
        if self.stochastic_depth_rates == "uniform":
            return (self.stochastic_depth,) * self.num_blocks
        last = max(1, self.num_blocks - 1)
        return tuple(self.stochastic_depth * number / last for number in range(self.num_blocks))

    @property
    def skipped_rates(self) -> tuple[float, ...]:
        """The `branch_rates`, but 0 for blocks that compute their branches for all images and multiply the skipped ones
        by 0. These are blocks with rates up to 0.1, as in DINOv2's code: skipping so few images would not make up for
        gathering the others."""
        return tuple(rate if rate > _MOST_UNSKIPPED else 0.0 for rate in self.branch_rates)

    @property
    def is_rotary(self) -> bool:
        """True if attention turns queries and keys by their patches' places."""
        return self.position in ("rope2d", "learned_rope2d")

    @property
    def has_table(self) -> bool:
        """True if there is one learned position embedding for each token."""
        return self.position in ("learned_1d", "learned_rope2d")

    @property
    def num_class_tokens(self) -> int:
        """The number of tokens before the patches that a head reads, each with a position of its own: 1 with a class
        token, 2 with a distillation token beside it, else 0."""
        return 1 + self.distillation_token if self.pooling == "token" else 0

    @property
    def num_classifiers(self) -> int:
        """The number of linear classifiers: 2 with a distillation token, else 1."""
        return 1 + self.distillation_token

    @property
    def num_prefix_tokens(self) -> int:
        """The number of tokens before the patches: the class token, if there is one, the distillation token, and
        registers."""
        return self.num_class_tokens + self.registers

    def _refuse_misfits(self) -> None:
        size, stride = self.size, self.stride
        self._refuse_masked_misfits()
        if self.masked_patches and self.representation:
            raise UserError(
                "model.representation is on with model.masked_patches, whose head reads the patches, without a hidden "
                "layer; give --model.no-representation"
            )
        if self.masked_patches and self.pooling == "attention":
            raise UserError(
                "model.pooling is 'attention' with model.masked_patches, whose head reads the patches, so the pooling "
                "would learn nothing; give --model.pooling average or token"
            )
        if self.masked_patches and self.last_norm != "tokens":
            raise UserError(
                f"model.last_norm is {self.last_norm!r} with model.masked_patches, whose head reads the norm of each "
                "patch; give --model.last-norm tokens"
            )
        if self.stochastic_depth_rates != "rising" and not self.stochastic_depth:
            raise UserError(
                f"model.stochastic_depth_rates is {self.stochastic_depth_rates!r} with model.stochastic_depth 0, with "
                "which no block leaves out anything; give --model.stochastic-depth above 0, or "
                "--model.stochastic-depth-rates rising"
            )
        if self.distillation_token:
            self._refuse_distillation_token()
        if self.pooling == "attention" and self.last_norm == "pooled":
            raise UserError(
                "model.last_norm is 'pooled' with model.pooling 'attention', which has a norm of its own after it; "
                "give --model.last-norm tokens or none"
            )
        if self.image_size < stride:
            raise UserError(
                f"model.image_size is {self.image_size}, less than one patch ({stride} px); "
                f"take {stride} or a multiple of it, or another --model.patch"
            )
        if self.image_size % stride:
            lower, upper = self.image_size // stride * stride, -(-self.image_size // stride) * stride
            raise UserError(
                f"model.image_size is {self.image_size}, not a multiple of the patch ({stride} px); "
                f"take {lower} or {upper}, or another --model.patch"
            )
        if size.width % size.num_heads:
            raise UserError(f"model.width is {size.width}, not a multiple of model.num_heads = {size.num_heads}")
        if self.attention == "axial":
            self._refuse_axial()
        self._refuse_positions()

    def _refuse_distillation_token(self) -> None:
        """Raises UserError for settings with which there can be no distillation token."""
        if self.pooling != "token":
            raise UserError(
                f"model.distillation_token is on with model.pooling {self.pooling!r}, which has no class token beside "
                "which it could be; give --model.pooling token, or --model.no-distillation-token"
            )
        if self.masked_patches:
            raise UserError(
                "model.distillation_token is on with model.masked_patches, whose head reads the patches; give "
                "--model.no-distillation-token"
            )
        if self.representation:
            raise UserError(
                "model.representation is on with model.distillation_token, whose two heads read the tokens without a "
                "hidden layer (DeiT); give --model.no-representation"
            )

    def _refuse_axial(self) -> None:
        """Raises UserError for settings that axial attention does not support."""
        if self.pooling == "token":
            raise UserError(
                "model.attention is 'axial' with model.pooling 'token', whose class token is in no row or column of "
                "patches; give --model.pooling average, or leave out --model.attention"
            )
        if self.position == "relative" or self.is_rotary:
            raise UserError(
                f"model.attention is 'axial' with model.position {self.position!r}, which is of the sequence of all "
                "tokens, not of a row or column; give --model.position learned_1d, learned_2d, sincos2d or none"
            )
        if self.registers:
            raise UserError(
                f"model.attention is 'axial' with model.registers {self.registers}, which are in no row or column of "
                "patches; give --model.registers 0, or leave out --model.attention"
            )

    def _refuse_positions(self) -> None:
        """Raises UserError if the kind of positions does not fit the place where they are added, or the width."""
        size = self.size
        if self.position_at != "input" and self.position not in ("learned_1d", "learned_2d"):
            is_of_input = self.position in ("sincos2d", "learned_rope2d")
            adds = "is added to the input alone" if is_of_input else "adds nothing to the input"
            raise UserError(
                f"model.position_at is {self.position_at!r} with model.position {self.position!r}, which {adds}; "
                "leave it out, or give --model.position learned_1d or learned_2d"
            )
        if self.registers and (self.position == "relative" or self.position_at != "input"):
            how = "position 'relative'" if self.position == "relative" else f"position_at {self.position_at!r}"
            raise UserError(
                f"model.registers is {self.registers} with model.{how}: registers have no position, so positions must "
                "be added to the input alone; give --model.registers 0, or --model.position learned_1d without "
                "--model.position-at"
            )
        if self.position == "sincos2d" and (size.width % 4 or size.width < 8):
            raise UserError(
                f"model.width is {size.width}: sincos2d positions have sines and cosines of columns and rows, a "
                "quarter of it each, of at least two frequencies; give a --model.width that is a multiple of 4 from 8 "
                "on, or --model.position learned_1d"
            )
        if self.is_rotary and size.width // size.num_heads % 4:
            raise UserError(
                f"model.width is {size.width} with {size.num_heads} heads: {self.position} turns pairs of channels of "
                "a head, as many for columns as for rows, so a head needs a multiple of 4 channels, not "
                f"{size.width // size.num_heads}; give another --model.width or --model.num-heads, or "
                "--model.position learned_1d"
            )
        rotary = (self.rotary_temperature, self.rotary_places, self.rotary_grid)
        if not self.is_rotary and rotary != (100.0, "from_zero", 0):
            raise UserError(
                f"model.rotary_temperature, rotary_places and rotary_grid are {', '.join(map(str, rotary))} with "
                f"model.position {self.position!r}, which turns nothing; give --model.position rope2d or "
                "learned_rope2d, or leave them out"
            )
        if self.rotary_places == "centred" and self.rotary_grid:
            raise UserError(
                f"model.rotary_grid is {self.rotary_grid} with model.rotary_places 'centred', whose axis has the same "
                "length for any grid; give --model.rotary-grid 0"
            )
        if self.position == "learned_2d" and size.width % 2:
            raise UserError(
                f"model.width is {size.width}: 2-D position embeddings take half of it for columns and half for rows; "
                "give an even --model.width, or --model.position learned_1d"
            )

    def _refuse_masked_misfits(self) -> None:
        target, share = self.masked_target, self.masked_share
        if not self.masked_patches:
            if (target, share) != ("mean", 0.5):
                raise UserError(
                    f"model.masked_target is {target!r} and model.masked_share {share:g} without model.masked_patches, "
                    "which alone uses them; give --model.masked-patches, or leave them out"
                )
            return
        if target == "parts" and self.stride % PARTS_PER_SIDE:
            raise UserError(
                f"model.masked_target is 'parts' with patches of {self.stride} px, which are cut into "
                f"{PARTS_PER_SIDE} x {PARTS_PER_SIDE} parts; give a --model.patch whose pixels are a multiple of "
                f"{PARTS_PER_SIDE}, or --model.masked-target mean or pixels"
            )
        if self.num_classes != num_masked_outputs(target, side=self.stride):
            what = {
                "mean": f"{MEAN_COLOURS} mean colours",
                "parts": f"{MEAN_COLOURS} colours for each of {PARTS_PER_SIDE**2} parts of a patch",
                "pixels": f"3 values for each of the {self.stride} x {self.stride} pixels of a patch",
            }[target]
            raise UserError(
                f"model.num_classes is {self.num_classes} with model.masked_patches, which predicts {what}; give "
                f"--model.num-classes {num_masked_outputs(target, side=self.stride)}, or --model.no-masked-patches"
            )

    def _refuse_fields_of_transformers(self) -> None:
        of_head = ("num_classes", "head_bias", "head_std")
        own = {"name", "image_size", "resnet_units", "resnet_factor", "resnet_epsilons", *of_head}
        foreign = [f.name for f in fields(self) if f.name not in own and getattr(self, f.name) != f.default]
        if foreign:
            given = ", ".join(f"model.{field} is {getattr(self, field)!r}" for field in foreign)
            raise UserError(f"{given}; {self.name} is a ResNet and has no such part; leave it out")


def num_masked_outputs(target: MaskedTarget, *, side: int) -> int:
    """Returns the number of outputs of the head per patch of `side` pixels, in masked patch prediction."""
    if target == "pixels":
        return 3 * side**2
    return MEAN_COLOURS * (PARTS_PER_SIDE**2 if target == "parts" else 1)


def fixed_patches(config: ModelConfig) -> list[str]:
    """Returns the settings that tie a model to patches of one size, each with the reason, as words for a message. Empty
    if the kernel and the positions can be resized without training."""
    reasons = {
        f"model.name {config.name!r}, whose patches are not pixels of the image but cells of a ResNet": config.resnet,
        "model.masked_patches, whose targets have one size": config.masked_patches,
        "model.position 'relative', which is of one sequence": config.position == "relative",
        "model.position_at 'layers', whose tables have one size": config.position_at == "layers",
        "model.position 'sincos2d', which counts patches, so that a place has another position with each size": (
            config.position == "sincos2d"
        ),
    }
    return [words for words, is_so in reasons.items() if is_so]


def without_masked_patches(config: ModelConfig) -> ModelConfig:
    """Returns the configuration of the same model as a classifier of images. Its head must be replaced."""
    return replace(config, masked_patches=False, masked_target="mean", masked_share=0.5)
