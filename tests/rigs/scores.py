"""Scores made by hand."""

from pipeline.evaluation.scores import Scores


def scores_with(*, num_images: int, accuracy: float, loss: float) -> Scores:
    """These, and others that go with them."""
    return Scores(
        num_images=num_images,
        num_unlabeled=0,
        accuracy=accuracy,
        top5=min(1.0, accuracy + 0.1),
        mean_per_class=accuracy,
        calibration_error=0.1,
        chance=0.1,
        loss=loss,
    )
