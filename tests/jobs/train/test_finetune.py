"""`patchline finetune` needs initial weights; everything else is the same as in pre-training."""

from collections.abc import Iterator

from jobs.recipes import bit_finetune, deit3_finetune
from jobs.recipes.finetune import RECIPES
from tests.rigs.faults import differs, every_fault


@every_fault
def test_recipes_fine_tune_as_the_paper_does() -> Iterator[str]:
    """Table 4 and appendix B.1.1: SGD with momentum 0.9, cosine decay, no weight decay, clipping at 1, a new head.
    BiT-HyperRule has a staircase and no clipping. DeiT III's recipes are compared in recipes/test_deit3.py."""
    for name, recipe in RECIPES.items():
        if name in deit3_finetune.RECIPES:
            continue
        job, (decay, clip_norm) = recipe(), ("staircase", 0.0) if name in bit_finetune.RECIPES else ("cosine", 1.0)
        yield from differs(f"{name}: optimizer.name", job.optimizer.name, "sgd")
        yield from differs(f"{name}: optimizer.momentum", job.optimizer.momentum, 0.9)
        yield from differs(f"{name}: optimizer.weight_decay", job.optimizer.weight_decay, 0.0)
        yield from differs(f"{name}: schedule.decay", job.schedule.decay, decay)
        yield from differs(f"{name}: clip_norm", job.clip_norm, clip_norm)
        yield from differs(f"{name}: initial.new_head", job.initial.new_head, True)
        if job.model.image_size <= 32:
            yield f"{name}: model.image_size is {job.model.image_size}, expected more than 32"
