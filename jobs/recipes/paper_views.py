"""How the paper, its code and big_vision crop and resize images for training, and resize them for an evaluation.

- `CODE`: vision_transformer, vit_jax/input_pipeline.py: inception crop of 5 to 100 % of the area, flip; direct resize
  to evaluate. The aspect ratio is TensorFlow's default, 0.75 to 1.33.
- `PAPER`: "An Image is Worth 16x16 Words", section 4.1, refers to "Big Transfer" (BiT), whose section 3.3 resizes to
  448 x 448, cuts a random 384 x 384 and flips; direct resize to evaluate. (BiT's released code has 512 and 480.)
- `INCEPTION_448` and `RESMALL_448`: big_vision, configs/transfer.py and pp/ops_image.py: inception crop, or a random
  384 out of a short side of 448; flip; central crop out of a short side of 448 to evaluate.
- `PRETRAINING`: big_vision, configs/vit_i21k.py: inception crop, flip; central 224 out of a short side of 256 to
  evaluate. How the paper's own pre-training was evaluated is not published.

big_vision resizes short sides by areas, all else is bilinear without antialiasing. None looks at EXIF. All decode whole
images but big_vision's pre-training, which decodes the crop alone (decode_jpeg_and_inception_crop), and so do we. Their
JPEGs are decoded with TensorFlow's default, the fast integer DCT; ours with the accurate one, as Pillow and OpenCV do.
"""

from dataclasses import dataclass

from pipeline.data.config import AugmentConfig
from pipeline.shared_settings import EvaluationTransform


@dataclass(frozen=True, kw_only=True)
class Views:
    """What a training step and an evaluation see of an image."""

    training: AugmentConfig
    evaluation: EvaluationTransform


_INCEPTION = AugmentConfig(crop="inception", min_area=0.05, max_ratio=1.33, flip=True, exif=False, scaled_decode=False)
_RESIZE_CROP = AugmentConfig(crop="resize_crop", flip=True, exif=False, scaled_decode=False)
_RESMALL_CROP = AugmentConfig(crop="short_side_crop", flip=True, filter="area", exif=False, scaled_decode=False)
_DIRECT = EvaluationTransform(mode="resize", exif=False)
_CENTRAL = EvaluationTransform(mode="central_crop", filter="area", exif=False)
_CENTRAL_448 = EvaluationTransform(mode="central_crop", short_side=448, filter="area", exif=False)

CODE = Views(training=_INCEPTION, evaluation=_DIRECT)
PAPER = Views(training=_RESIZE_CROP, evaluation=_DIRECT)
INCEPTION_448 = Views(training=_INCEPTION, evaluation=_CENTRAL_448)
RESMALL_448 = Views(training=_RESMALL_CROP, evaluation=_CENTRAL_448)
PRETRAINING = Views(training=_INCEPTION, evaluation=_CENTRAL)
