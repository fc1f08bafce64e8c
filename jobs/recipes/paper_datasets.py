"""The datasets of the paper's tables: their numbers of images and classes, which determine steps and costs.

Sources: "An Image is Worth 16x16 Words", section 4.1 (JFT-300M: 303 million images, 18 thousand classes; ImageNet-21k:
14 million, 21 thousand), Table 3 (epochs), the published weights' heads (21,843 classes), the datasets' own papers.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class PaperDataset:
    """A training set. `num_classes` is 0 if it consists of several sets, each with its own number."""

    name: str
    num_images: int
    num_classes: int


JFT = PaperDataset(name="JFT-300M", num_images=303_000_000, num_classes=18_291)
IMAGENET_21K = PaperDataset(name="ImageNet-21k", num_images=14_200_000, num_classes=21_843)
IMAGENET_1K = PaperDataset(name="ImageNet-1k", num_images=1_280_000, num_classes=1000)
CIFAR10 = PaperDataset(name="CIFAR-10", num_images=50_000, num_classes=10)
CIFAR100 = PaperDataset(name="CIFAR-100", num_images=50_000, num_classes=100)
PETS = PaperDataset(name="Oxford-IIIT Pets", num_images=3680, num_classes=37)
FLOWERS = PaperDataset(name="Oxford Flowers-102", num_images=2040, num_classes=102)
VTAB = PaperDataset(name="VTAB-1k, one task", num_images=1000, num_classes=0)
DIGITS = PaperDataset(name="scikit-learn's digits", num_images=1438, num_classes=10)
