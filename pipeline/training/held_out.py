"""Scores on the held-out datasets while a run trains."""

from collections.abc import Mapping

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
    """`sets`: datasets by their names, empty for the one that the best model is by. `labels`: the names of the model's
    classes. `of_others`: values of the others' last scores, for the metrics. `was_given_up`: an evaluation that was due
    gave way to a stop request."""

    def __init__(
        self,
        job: TrainingJob,
        engine: Engine,
        world: World,
        *,
        sets: Mapping[str, Dataset],
        labels: tuple[str, ...],
        watch: Watch,
    ) -> None:
        self.job, self.engine, self.world, self.labels = job, engine, world, labels
        self.dataset, self.of_others = sets.get(""), dict[str, float]()
        self.also = {name: dataset for name, dataset in sets.items() if name}
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
                scores = self._scores_on(self.dataset)
                others = {f"eval/{name}/": self._scores_on(dataset) for name, dataset in self.also.items()}
                self.of_others = {key: x for prefix, one in others.items() for key, x in one.values(prefix).items()}
                return scores
        except WaitGivenUpError:
            self.was_given_up = True
            return None
        finally:
            self.engine.train(True)

    def _scores_on(self, dataset: Dataset) -> Scores:
        scores, _ = evaluate(
            self.engine.module,
            dataset,
            self.job.evaluation,
            labels=self.labels,
            loss=self.job.loss,
            world=self.world,
            label_weights=self.job.data.label_weights,
            before_batch=self._begin_batch,
        )
        return scores

    def _begin_batch(self) -> None:
        """Raises WaitGivenUpError on all ranks if one is asked to exit. Collective."""
        self._num_batches += 1
        self.watch.stopping.pulse.enters(Phase.EVALUATING, batch=self._num_batches)
        is_asked = self.watch.request() == StopRequest.SAVE_AND_EXIT
        if not all_agree(not is_asked, device=self.world.device):
            raise WaitGivenUpError("evaluating")
