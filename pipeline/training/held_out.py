"""Scores on the held-out dataset while a run trains."""

from pipeline.collectives import all_agree
from pipeline.evaluation.scores import Scores, evaluate
from pipeline.training.config import TrainingJob
from pipeline.training.engine import Engine
from pipeline.training.pulse import Phase
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
        self.watch, self.was_given_up, self._num_batches = watch, False, 0

    def is_due(self, step: int) -> bool:
        """Whether an evaluation follows `step`."""
        every = self.job.evaluation.every_steps
        return self.dataset is not None and (step == self.job.steps or (every > 0 and step % every == 0))

    def scores(self, step: int) -> Scores | None:
        """Accuracy and loss after `step`; None if none are due, or if the evaluation was given up. Collective."""
        if self.dataset is None or not self.is_due(step):
            return None
        self._num_batches = 0
        try:
            with self.watch.waiting("evaluation", "evaluating"):
                self.engine.train(False)
                scores, _ = evaluate(
                    self.engine.module,
                    self.dataset,
                    self.job.evaluation,
                    labels=self.labels,
                    loss=self.job.loss,
                    world=self.world,
                    label_weights=self.job.data.label_weights,
                    before_batch=self._begin_batch,
                )
                return scores
        except WaitGivenUpError:
            self.was_given_up = True
            return None
        finally:
            self.engine.train(True)

    def _begin_batch(self) -> None:
        """Raises WaitGivenUpError on all ranks if one is asked to exit. Collective."""
        self._num_batches += 1
        self.watch.stopping.pulse.enters(Phase.EVALUATING, batch=self._num_batches)
        is_asked = self.watch.request() == StopRequest.SAVE_AND_EXIT
        if not all_agree(not is_asked, device=self.world.device):
            raise WaitGivenUpError("evaluating")
