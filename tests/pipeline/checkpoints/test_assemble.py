"""The manifest says where every rank's pieces are."""

import torch

from jobs.recipes.pretrain import digits_smoke
from pipeline.checkpoints.assemble import draft_manifest, with_reports
from pipeline.checkpoints.fragment import Fragment
from pipeline.checkpoints.fragments import lay_out
from pipeline.checkpoints.manifest import CheckpointId, draft_from_json, manifest_to_json
from pipeline.checkpoints.rank_report import FileFacts, RankReport
from pipeline.training.saved_job import saved_job
from tests.rigs.positions import position_at


def fragment(name: str, start: int, values: list[float]) -> Fragment:
    tensor = torch.tensor(values)
    return Fragment(name=name, start=start, length=len(values), slots={"master": tensor, "exp_avg": -tensor})


def test_the_manifest_puts_the_ranks_pieces_in_order() -> None:
    reports = []
    for rank, part in enumerate([fragment("a", 2, [3.0, 4.0]), fragment("a", 0, [1.0, 2.0])]):
        laid_out = lay_out([part])
        facts = FileFacts(num_bytes=laid_out.head.num_bytes, part_bytes=1 << 20, sha256=("0" * 64,))
        reports.append(RankReport(save=1, file=f"rank-{rank}", record=facts, pieces=laid_out.pieces))
    draft = draft_manifest(
        CheckpointId(step=7, attempt="0001-a"),
        shapes={"a": (2, 2)},
        position=position_at(7),
        num_updates=6,
        job=saved_job(digits_smoke()),
        record={},
    )
    manifest = with_reports(draft_from_json(manifest_to_json(draft)), reports)
    places = manifest.tensors["a"].slots["master"]
    assert [(place.file, place.start, place.length) for place in places] == [("rank-1", 0, 2), ("rank-0", 2, 2)]
    assert (manifest.moments, manifest.num_updates, manifest.num_samples) == (("exp_avg",), 6, 7 * 16)
