"""Scores on the held-out dataset while a run trains."""

from pipeline.collectives import all_agree
from pipeline.evaluation.scores import Scores, evaluate
from pipeline.training.config import TrainingJob
from pipeline.training.engine import Engine
from pipeline.training.signals import StopRequest
from pipeline.training.stopping import WaitGivenUpError
from pipeline.training.watch import Watch
from pipeline.world import World
from shards.dataset import Dataset


class HeldOut:
    """`labels`: the names of the model's classes. `was_given_up`: an evaluation that was due gave way to a stop
    request."""

    def __init__(
        self,
        job: TrainingJob,
        engine: Engine,
        world: World,
        *,
        dataset: Dataset | None,
        labels: tuple[str, ...],
        watch: Watch,
    ) -> None:
        self.job, self.engine, self.world, self.dataset, self.labels = job, engine, world, dataset, labels
        self.watch, self.was_given_up = watch, False

    def scores(self, step: int) -> Scores | None:
        """Accuracy and loss after `step`; None if none are due, or if the evaluation was given up. Collective."""
        every = self.job.evaluation.every_steps
        is_due = step == self.job.steps or (every > 0 and step % every == 0)
        if self.dataset is None or not is_due:
            return None
        try:
            with self.watch.waiting("evaluation", "evaluating"):
                self.engine.train(False)
                return evaluate(
                    self.engine.module,
                    self.dataset,
                    self.job.evaluation,
                    labels=self.labels,
                    loss=self.job.loss,
                    world=self.world,
                    before_batch=self._give_up_if_asked,
                )
        except WaitGivenUpError:
            self.was_given_up = True
            return None
        finally:
            self.engine.train(True)

    def _give_up_if_asked(self) -> None:
        """Raises WaitGivenUpError on all ranks if one is asked to exit. Collective."""
        is_asked = self.watch.request() == StopRequest.SAVE_AND_EXIT
        if not all_agree(not is_asked, device=self.world.device):
            raise WaitGivenUpError("evaluating")
