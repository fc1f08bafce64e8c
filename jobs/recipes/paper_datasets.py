"""The datasets of the paper's tables: their numbers of images and classes, which determine steps and costs.

Sources: "An Image is Worth 16x16 Words", section 4.1 (JFT-300M: 303 million images, 18 thousand classes; ImageNet-21k:
14 million, 21 thousand), Table 3 (epochs), the published weights' heads (21,843 classes), the datasets' own papers
(ILSVRC 2012: 1,281,167 images), big_vision's vit_i21k.py (AugReg leaves out the first 51,200 images) and vit_i1k.py
(which leaves out the last 1 %).
"""

from dataclasses import dataclass, replace

from pipeline.data.config import DataConfig


@dataclass(frozen=True, kw_only=True)
class PaperDataset:
    """A training set. `num_classes` is 0 if it consists of several sets, each with its own number."""

    name: str
    num_images: int
    num_classes: int


JFT = PaperDataset(name="JFT-300M", num_images=303_000_000, num_classes=18_291)
# The paper says "nearly 3 billion" images; the classes are those of big_vision's train_vit_g.py.
JFT_3B = PaperDataset(name="JFT-3B", num_images=3_000_000_000, num_classes=29_593)
# "Big Transfer" says 14.2 million; the exact number of the authors' copy is not published.
IMAGENET_21K = PaperDataset(name="ImageNet-21k", num_images=14_200_000, num_classes=21_843)
IMAGENET_1K = PaperDataset(name="ImageNet-1k", num_images=1_281_167, num_classes=1000)
IMAGENET_1K_99 = PaperDataset(  # train[:99%], rounded by TFDS; the rest is for choosing
    name="ImageNet-1k, big_vision's training split", num_images=1_268_355, num_classes=IMAGENET_1K.num_classes
)
IMAGENET_21K_LEFT_OUT = 51_200
IMAGENET_21K_AUGREG = PaperDataset(  # full[51200:]; the rest is for testing
    name="ImageNet-21k, AugReg's training split",
    num_images=IMAGENET_21K.num_images - IMAGENET_21K_LEFT_OUT,
    num_classes=IMAGENET_21K.num_classes,
)
CIFAR10 = PaperDataset(name="CIFAR-10", num_images=50_000, num_classes=10)
CIFAR100 = PaperDataset(name="CIFAR-100", num_images=50_000, num_classes=100)
PETS = PaperDataset(name="Oxford-IIIT Pets", num_images=3680, num_classes=37)
FLOWERS = PaperDataset(name="Oxford Flowers-102", num_images=2040, num_classes=102)
DIGITS = PaperDataset(name="scikit-learn's digits", num_images=1438, num_classes=10)


def for_many_ranks(data: DataConfig) -> DataConfig:
    """The same data in an order that 8 to 512 ranks read without reading it twice: 512 lanes of one block.

    Lanes are fixed once a run has begun, so they suit the largest cluster that it may ever have. The shuffle reaches
    over 512 blocks, twice as far as with the defaults. Of images of 110 kB, a single host, which has all lanes, reads
    ahead 16.2 GB at most (20.3 GB at a batch of 16,384), and each of eight hosts 2.1 GB.
    """
    return replace(data, lanes=512, window_blocks=1, memory_limit_bytes=24_000_000_000)
