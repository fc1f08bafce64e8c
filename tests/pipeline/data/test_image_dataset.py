"""A packed dataset as a sequence of images, and for PyTorch's own DataLoader."""

import gc
import pickle
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import patchline
from pipeline.data.image_dataset import ImageDataset, open_dataset
from shards.dataset import open_dataset as open_packed
from shards.errors import InvalidDataError, UserError
from tests.rigs.datasets import index_rows, packed_folders


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> ImageDataset:
    return open_dataset(str(packed_folders(tmp_path_factory.mktemp("photos"))))


def test_images_come_by_number_as_they_were_packed(photos: ImageDataset) -> None:
    packed = open_packed(photos.url)
    rows = [row for shard in range(len(packed.manifest.shards)) for row in index_rows(packed, shard)]
    assert len(photos) == len(rows) == packed.num_samples > 2
    assert photos.classes == packed.label_names
    found = list(photos)
    assert [one.labels for one in found] == [tuple(row.labels) for row in rows]
    assert [one.names[0] for one in found] == [photos.classes[row.labels[0]] for row in rows]
    assert found[0].image.size == (found[0].pixels.shape[1], found[0].pixels.shape[0])
    assert photos[-1].source == found[-1].source != ""
    assert [one.source for one in photos[1:3]] == [one.source for one in found[1:3]]
    assert repr(photos).startswith(f"ImageDataset({photos.url!r}, {len(rows)} images of 3 classes: c0, c1, c2)")
    assert repr(found[0]).endswith(f"px, {found[0].names[0]})")
    for place in (len(photos), -len(photos) - 1):
        with pytest.raises(IndexError, match=f"of {len(photos)} in"):
            photos[place]


def test_it_is_a_dataset_of_torch_also_in_workers(photos: ImageDataset) -> None:
    assert repr(pickle.loads(pickle.dumps(photos))) == repr(photos)  # noqa: S301 - our own
    loader = DataLoader(photos.to_torch(image_size=16), batch_size=4, num_workers=1)  # type: ignore[arg-type,var-annotated]
    images, labels = next(iter(loader))
    assert (images.dtype, tuple(images.shape)) == (torch.uint8, (4, 3, 16, 16))
    assert labels.tolist() == [photos[number].label for number in range(4)]
    first, label = photos.to_torch()[0]
    assert torch.equal(first, torch.from_numpy(photos[0].pixels).permute(2, 0, 1))
    sized, _ = photos.to_torch(transform=lambda image: np.asarray(image.resize((8, 8))))[0]
    assert (sized.shape, label) == ((8, 8, 3), photos[0].label)
    with pytest.raises(UserError, match="give one of them"):
        photos.to_torch(transform=np.asarray, image_size=8)


def test_an_evaluation_has_every_image_once_over_all_ranks(photos: ImageDataset) -> None:
    seen: list[tuple[int, int | None]] = []
    for rank in range(2):
        batches = list(photos.evaluation_batches(batch_size=4, image_size=16, rank=rank, num_ranks=2))
        assert len(batches) == -(-len(photos) // 8)
        for batch, mask in batches:
            assert batch.images.shape == (4, 16, 16, 3)
            seen += zip(batch.sample_ids[mask].tolist(), batch.labels[:, 0][mask].tolist(), strict=True)
    assert sorted(seen) == [(number, photos[number].label) for number in range(len(photos))]
    first, _ = next(photos.evaluation_batches(batch_size=1, image_size=16))
    assert torch.equal(first.images[0].permute(2, 0, 1), photos.to_torch(image_size=16)[0][0])
    with pytest.raises(UserError, match=r"batch_size is 0; allowed: 1 or more"):
        photos.evaluation_batches(batch_size=0, image_size=16)
    with pytest.raises(UserError, match=r"rank is 2; allowed: 0 to 1"):
        photos.evaluation_batches(batch_size=4, image_size=16, rank=2, num_ranks=2)


def test_a_dataset_for_a_loader_can_be_one_ranks_share(photos: ImageDataset) -> None:
    whole = photos.to_torch(image_size=16)
    shares = [photos.to_torch(image_size=16, rank=rank, num_ranks=2) for rank in range(2)]
    assert [len(share) for share in shares] == [-(-len(photos) // 2), len(photos) // 2]
    for number in range(len(photos)):
        assert torch.equal(shares[number % 2][number // 2][0], whole[number][0])
    with pytest.raises(IndexError, match=f"image {len(shares[0])} of {len(shares[0])} in"):
        shares[0][len(shares[0])]
    assert torch.equal(shares[1][-1][0], shares[1][len(shares[1]) - 1][0])


def test_a_dataset_for_a_loader_is_not_whole_or_shared_by_chance(
    photos: ImageDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under torchrun a plain DataLoader wants a share, and one whose sampler divides the images wants them all."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match=r"rank 1 of 2 \(.*rank=0, num_ranks=1.*rank=1, num_ranks=2"):
        photos.to_torch(image_size=16)
    assert len(photos.to_torch(image_size=16, rank=0, num_ranks=1)) == len(photos)
    assert len(photos.to_torch(image_size=16, rank=1, num_ranks=2)) == len(photos) // 2


def test_a_damaged_image_is_named(tmp_path: Path) -> None:
    url = packed_folders(tmp_path)
    packed = open_packed(str(url))
    row, tar = index_rows(packed, 0)[0], url / packed.shard_path(0)
    data = bytearray(tar.read_bytes())
    data[row.offset + 5] ^= 255
    tar.write_bytes(data)
    with pytest.raises(InvalidDataError, match=r"image 0 of .* cannot be used: crc32"):
        open_dataset(str(url))[0]


def test_batches_need_no_with_block_and_close_when_they_are_collected(photos: ImageDataset) -> None:
    before = set(threading.enumerate())
    batches = patchline.train_batches(photos.url, global_batch=4, image_size=16)
    assert next(iter(batches)).images.shape == (4, 16, 16, 3)
    assert set(threading.enumerate()) - before
    del batches
    gc.collect()
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=30)
    assert not set(threading.enumerate()) - before
