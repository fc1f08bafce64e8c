"""A position of a stream, for tests that need any."""

from pipeline.data.position import StreamPosition


def position_at(next_step: int) -> StreamPosition:
    """Of a stream of batches of 16 samples."""
    return StreamPosition(
        next_step=next_step,
        order_version=1,
        seed=0,
        global_batch=16,
        lanes=8,
        window_blocks=2,
        augment={"crop": "inception", "min_area": 0.05, "flip": True, "version": 2},
        decoder={"version": 3, "simplejpeg": "1.9.0"},
        dataset="cd" * 32,
        subset=None,
        held_out=None,
        randaugment=None,
        mixup=None,
        mix=None,
        label_weights=False,
        image_size=32,
        data_step=next_step,
        skipped=(),
    )
