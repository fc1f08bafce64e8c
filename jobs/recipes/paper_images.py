"""Lists the datasets of the papers, whose numbers of images and classes decide steps and costs, and the ways in which
the papers prepare images for training and for an evaluation.

Sources: "An Image is Worth 16x16 Words", section 4.1 (JFT-300M: 303 million images, 18 thousand classes; ImageNet-21k:
14 million, 21 thousand), Table 3 (epochs), the published weights' heads (21,843 classes), the datasets' own papers
(ILSVRC 2012: 1,281,167 images), big_vision's vit_i21k.py (AugReg leaves out the first 51,200 images) and vit_i1k.py
(which leaves out the last 1 %).

- `CODE`: vision_transformer, vit_jax/input_pipeline.py: inception crop of 5 to 100 % of the area, flip; direct resize
  to evaluate. The aspect ratio is TensorFlow's default, 0.75 to 1.33.
- `PAPER`: "An Image is Worth 16x16 Words", section 4.1, refers to "Big Transfer" (BiT), whose section 3.3 resizes to
  448 x 448, cuts a random 384 x 384 and flips; direct resize to evaluate. (BiT's released code has 512 and 480.)
- `INCEPTION_448` and `RESMALL_448`: big_vision, configs/transfer.py and pp/ops_image.py: inception crop, or a random
  384 x 384 crop after the short side is resized to 448; flip. For an evaluation, the short side is resized to 448 and
  the centre is cropped.
- `PRETRAINING`: big_vision, configs/vit_i21k.py: inception crop, flip. For an evaluation, the short side is resized to
  256 and the central 224 x 224 are cropped. How the paper's own pre-training was evaluated is not published.

big_vision averages areas when it resizes short sides; all other resizing is bilinear without antialiasing. None of this
code reads EXIF. big_vision's pre-training decodes only the crop of an image (decode_jpeg_and_inception_crop), and so do
we; the others decode whole images. All of this code decodes JPEGs with TensorFlow's default, the fast integer DCT; we
use the accurate DCT, like Pillow and OpenCV.
"""

from dataclasses import dataclass, replace

from pipeline.data.config import AugmentConfig, DataConfig
from pipeline.evaluation.config import EvaluationConfig
from pipeline.shared_settings import EvaluationTransform
from pipeline.training.settings.job import EngineConfig, GuardConfig, TrainingJob


@dataclass(frozen=True, kw_only=True)
class PaperDataset:
    """A training set. `num_classes` is 0 if it consists of several datasets with different numbers of classes."""

    name: str
    num_images: int
    num_classes: int


@dataclass(frozen=True, kw_only=True)
class Views:
    """How an image is prepared for training and for an evaluation."""

    training: AugmentConfig
    evaluation: EvaluationTransform


IMAGENET_21K_LEFT_OUT = 51_200
_INCEPTION = AugmentConfig(crop="inception", min_area=0.05, max_ratio=1.33, flip=True, exif=False, scaled_decode=False)
_RESIZE_CROP = AugmentConfig(crop="resize_crop", flip=True, exif=False, scaled_decode=False)
_RESMALL_CROP = AugmentConfig(crop="short_side_crop", flip=True, filter="area", exif=False, scaled_decode=False)
_DIRECT = EvaluationTransform(mode="resize", exif=False)
_CENTRAL = EvaluationTransform(mode="central_crop", filter="area", exif=False)
_CENTRAL_448 = EvaluationTransform(mode="central_crop", short_side=448, filter="area", exif=False)
JFT = PaperDataset(name="JFT-300M", num_images=303_000_000, num_classes=18_291)
# The paper says "nearly 3 billion" images. The number of classes is from big_vision's train_vit_g.py.
JFT_3B = PaperDataset(name="JFT-3B", num_images=3_000_000_000, num_classes=29_593)
# "Big Transfer" says 14.2 million; the exact number of the authors' copy is not published.
IMAGENET_21K = PaperDataset(name="ImageNet-21k", num_images=14_200_000, num_classes=21_843)
IMAGENET_1K = PaperDataset(name="ImageNet-1k", num_images=1_281_167, num_classes=1000)
IMAGENET_1K_99 = PaperDataset(  # train[:99%], rounded by TFDS; settings are chosen on the rest
    name="ImageNet-1k, big_vision's training split", num_images=1_268_355, num_classes=IMAGENET_1K.num_classes
)
IMAGENET_21K_AUGREG = PaperDataset(  # full[51200:]; the rest is for tests
    name="ImageNet-21k, AugReg's training split",
    num_images=IMAGENET_21K.num_images - IMAGENET_21K_LEFT_OUT,
    num_classes=IMAGENET_21K.num_classes,
)
CIFAR10 = PaperDataset(name="CIFAR-10", num_images=50_000, num_classes=10)
CIFAR100 = PaperDataset(name="CIFAR-100", num_images=50_000, num_classes=100)
PETS = PaperDataset(name="Oxford-IIIT Pets", num_images=3680, num_classes=37)
FLOWERS = PaperDataset(name="Oxford Flowers-102", num_images=2040, num_classes=102)
DIGITS = PaperDataset(name="scikit-learn's digits", num_images=1438, num_classes=10)
CODE = Views(training=_INCEPTION, evaluation=_DIRECT)
PAPER = Views(training=_RESIZE_CROP, evaluation=_DIRECT)
INCEPTION_448 = Views(training=_INCEPTION, evaluation=_CENTRAL_448)
RESMALL_448 = Views(training=_RESMALL_CROP, evaluation=_CENTRAL_448)
PRETRAINING = Views(training=_INCEPTION, evaluation=_CENTRAL)
# The settings that recipes of published pre-training start from.
PUBLISHED = TrainingJob(
    engine=EngineConfig(zero_stage=1, precision="bf16"),
    evaluation=EvaluationConfig(transform=PRETRAINING.evaluation),
    log_every_steps=50,
    guard=GuardConfig(on_spike="warn"),
)


def for_many_ranks(data: DataConfig) -> DataConfig:
    """Returns the same data in an order that 8 to 512 ranks can read without reading anything twice: 512 lanes of one
    block.

    Lanes are fixed once a run has begun, so there are enough for the largest cluster that the run may ever have. The
    shuffle reaches over 512 blocks, twice as far as with the defaults. With images of 110 kB, a single host, which
    reads all lanes, reads ahead at most 16.2 GB (20.3 GB at a batch of 16,384); with eight hosts, each reads ahead at
    most 2.1 GB.
    """
    return replace(data, lanes=512, window_blocks=1, memory_limit_bytes=24_000_000_000)
