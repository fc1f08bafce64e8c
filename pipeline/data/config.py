"""The settings of training data: where samples come from, and how they are shuffled, read, decoded and augmented.

This module has only configurations, so the command line can read them without loading torch, OpenCV or a decoder.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from pipeline.shared_settings import ResizeFilter, refuse_antialiased_area
from shards.config import HeldOutConfig, ReadConfig, SubsetConfig
from shards.config_values import Range, refuse_wrong_values
from shards.errors import UserError

# RandAugment's highest magnitude in big_vision's recipes. At 20, Posterize keeps all 8 bits.
MAX_MAGNITUDE = 20
DRAWS_PER_OP = 4  # the number of uniform draws for one RandAugment operation
_MOST_REPEATS = 64
COLOUR_DRAWS = 6  # the number of uniform draws for 3-Augment and the colour jitter
HuffmanDecoder = Literal["patchline", "libjpeg-turbo"]


@dataclass(frozen=True, kw_only=True)
class AugmentConfig:
    """How a training image is cropped, resized and mirrored."""

    crop: Literal["inception", "random_resized", "resize_crop", "short_side_crop", "simple_random", "none"] = (
        "inception"
    )
    """How the crop is drawn: inception (the paper's code), random_resized (torchvision's), resize_crop (BiT's: resize
    to a square, then cut a random square out of it), short_side_crop (big_vision's resmall_crop: the same, but the
    aspect ratio stays), simple_random (DeiT III's: the same from the model's size, with 4 pixels reflected at each
    edge), or none (a plain resize)."""
    resize_pixels: Annotated[int, Range(0, zero="448/384 of the model's size")] = 0
    """Pixels to which resize_crop resizes both sides, and short_side_crop the short side, before the random crop; at
    least the model's size; 0: 448/384 of it, as in BiT and big_vision, or with simple_random the model's size."""
    min_area: Annotated[float, Range(above=0, most=1)] = 0.05
    """Smallest crop, as a share of the image's area."""
    max_area: Annotated[float, Range(above=0, most=1)] = 1.0
    """Largest crop, as a share of the image's area."""
    min_ratio: Annotated[float, Range(above=0)] = 3 / 4
    """Narrowest crop: its width divided by its height."""
    max_ratio: Annotated[float, Range(above=0)] = 4 / 3
    """Widest crop: its width divided by its height."""
    flip: bool = True
    """Mirror half of the images, left to right."""
    antialias: bool = False
    """Average over all pixels that an output pixel covers, as Pillow and torchvision do; the paper's code does not."""
    filter: ResizeFilter = "bilinear"
    """How the crop is resized: bilinear, area (big_vision's before short_side_crop: the average of all pixels that an
    output pixel covers; enlarged images get blocks), or bicubic (Pillow's, which antialiases by itself)."""
    exif: bool = True
    """Turn images upright by their EXIF orientation, as most loaders do; the paper's code does not."""
    scaled_decode: bool = True
    """Decode large JPEGs at 1/2, 1/4 or 1/8 of their size if the crop still has at least the model's size: faster, and
    slightly smoother (by 3 grey levels on average, on photographs of 1600 x 1200)."""
    three_augment: bool = False
    """Turn each image grey, invert its bright pixels, or blur it: one of the three, at random (DeiT III's
    3-Augment)."""
    color_jitter: Annotated[float, Range(0, 1, zero="off")] = 0.0
    """Brightness, contrast and saturation change by factors of up to 1 +- this, in random order (torchvision's
    ColorJitter): 0.3 in DeiT III."""
    repeats: Annotated[int, Range(1, _MOST_REPEATS)] = 1
    """Views of each image that are drawn in a row, each augmented by draws of its own (repeated augmentation): 3 in
    DeiT and DeiT III, 1 for none. An epoch is still as many views as there are images, so it has 1/repeats of the
    images."""

    def __post_init__(self) -> None:
        refuse_wrong_values(self, where="data.augment.")
        refuse_antialiased_area(antialias=self.antialias, resize_filter=self.filter, where="data.augment.")
        for what in ("area", "ratio"):
            least, most = getattr(self, f"min_{what}"), getattr(self, f"max_{what}")
            if least > most:
                raise UserError(
                    f"data.augment.min_{what} is {least:g}, more than data.augment.max_{what}, {most:g}; "
                    "lower the first or raise the second"
                )

    @property
    def num_colour_draws(self) -> int:
        """The number of uniform draws per image for 3-Augment and the colour jitter."""
        return COLOUR_DRAWS if self.three_augment or self.color_jitter else 0


@dataclass(frozen=True, kw_only=True)
class MixupConfig:
    """Mixup and CutMix: each image and its target are mixed with another's."""

    alpha: Annotated[float, Range(0, 1, zero="off")] = 0.0
    """Strength, from 0 (off) to 1, where all weights are equally likely; big_vision's light2 uses 0.2, medium2 0.5."""
    cutmix_alpha: Annotated[float, Range(0, 1, zero="off")] = 0.0
    """CutMix: strength, from 0 (off) to 1, where all areas of the box that is taken from the other image are equally
    likely; if alpha is on, too, half of the pairs get mixup and half CutMix."""
    binary_targets: bool = False
    """With the sigmoid loss: give a mixed image all labels of both images in full, as DeiT III does, instead of their
    shares."""

    def __post_init__(self) -> None:
        refuse_wrong_values(self, where="data.mixup.")
        if self.binary_targets and not self.is_on:
            raise UserError(
                "data.mixup.binary_targets is on without mixup, whose targets it changes; give --data.mixup.alpha or "
                "--data.mixup.cutmix-alpha, or --data.mixup.no-binary-targets"
            )

    @property
    def is_on(self) -> bool:
        """Whether images are mixed."""
        return self.alpha > 0 or self.cutmix_alpha > 0


@dataclass(frozen=True, kw_only=True)
class RandAugmentConfig:
    """RandAugment: random operations on colours and geometry."""

    num_ops: Annotated[int, Range(0, zero="off")] = 0
    """Operations per image, 0 for none; big_vision's light2 and medium2 use 2."""
    magnitude: Annotated[int, Range(0, MAX_MAGNITUDE)] = 10
    """Strength of the operations, from 0 to 20; big_vision's light2 uses 10, medium2 15."""

    def __post_init__(self) -> None:
        refuse_wrong_values(self, where="data.randaugment.")

    @property
    def num_draws(self) -> int:
        """The number of uniform draws per image."""
        return DRAWS_PER_OP * self.num_ops


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which samples are trained on, in which order, and how they are read and decoded."""

    url: str = ""
    """Dataset to train on: a folder or s3://bucket/prefix."""
    mix: tuple[tuple[str, Annotated[float, Range(above=0)]], ...] = ()
    """Several datasets instead of one: URL WEIGHT URL WEIGHT ...; weights set each dataset's share of the samples, on
    any scale."""
    subset: SubsetConfig = SubsetConfig()
    """Part of the dataset to train on (of each dataset of a mix)."""
    held_out: HeldOutConfig = HeldOutConfig()
    """Part of the dataset that is not trained on; the run is scored on it, which also decides the best checkpoint."""
    lanes: Annotated[int, Range(1)] = 64
    """Parallel sequences into which the sample order is cut; must divide the global batch; at least one per rank."""
    window_blocks: Annotated[int, Range(1)] = 4
    """Blocks that a lane shuffles together; the shuffle reaches over lanes x window_blocks blocks of each dataset."""
    augment: AugmentConfig = AugmentConfig()
    """Random crops and flips."""
    randaugment: RandAugmentConfig = RandAugmentConfig()
    """Random changes of colour and geometry."""
    mixup: MixupConfig = MixupConfig()
    """Images and their targets mixed in pairs."""
    label_weights: bool = False
    """Use the weights that labels were packed with as targets, in training and on the held-out dataset: with sigmoid as
    they are, with softmax as shares of 1 (docs/schedules.md)."""
    reading: ReadConfig = ReadConfig()
    """Requests to the store."""
    num_threads: Annotated[int, Range(0, zero="the rank's share of the cores")] = 0
    """Most decoding threads per rank; fewer work while they keep up. 0: the rank's share of the machine's cores."""
    steps_ahead: Annotated[int, Range(1)] = 3
    """Batches prepared ahead of the step that needs them."""
    huffman_decoder: HuffmanDecoder = "patchline"
    """What decodes the Huffman codes of training JPEGs: patchline (its own decoder, two thirds of the CPU time) or
    libjpeg-turbo (code that is more widely used, and always used with a libjpeg-turbo newer than 3.1). The pixels are
    the same."""
    memory_limit_bytes: Annotated[int, Range(1)] = 16_000_000_000
    """Most bytes that all ranks of a host may read ahead; a start that could exceed it is refused."""
    max_quarantined: Annotated[float, Range(0, 1)] = 0.001
    """Share of samples, 0 to 1, that may be damaged and replaced; if there are more, the run stops."""
    allow_other_decoder: bool = False
    """Resume a run although the versions of the decoding libraries, and so the pixels, may differ."""

    def __post_init__(self) -> None:
        refuse_wrong_values(self, where="data.")
        if self.url and self.mix:
            raise UserError(f"the data is url {self.url} and a mix of {len(self.mix)}; give one of the two")
        if self.mix and not self.held_out.is_none:
            raise UserError(
                "data.held_out needs one dataset, data.url, and the data is a mix; give evaluation.url instead"
            )


@dataclass(frozen=True, kw_only=True)
class Share:
    """The slice of each global batch that a rank takes."""

    global_batch: int
    rank: int
    num_ranks: int


def refuse_wrong_sizes(**sizes: int) -> None:
    """Raises UserError, which names the size, if a size is below 1."""
    for name, value in sizes.items():
        if value < 1:
            raise UserError(f"{name} is {value}; allowed: 1 or more")
