"""A method with its hyperparameters, put together with a network, data and replicas."""

import argparse
import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import optax

import optperm
from optperm.cli import models, training
from optperm.cli.datasets import Dataset
from optperm.cli.errors import UsageError
from optperm.cli.methods import Hyperparameter, Method
from optperm.training.replicas import Replicas


@dataclasses.dataclass(frozen=True)
class Assembly:
    """A method and what it is to train.

    Attributes:
      method: The method.
      hyperparameters: All of its flags.
      spec: The network, and the seed of everything.
      data: What to train and test on.
      batch_size: Examples a step, of each replica.
    """

    method: Method
    hyperparameters: Mapping[str, Hyperparameter]
    spec: models.NetworkSpec
    data: Dataset
    batch_size: int

    @classmethod
    def of(
        cls,
        method: Method,
        hyperparameters: Mapping[str, Hyperparameter],
        arguments: argparse.Namespace,
        data: Dataset,
        *,
        seed: int,
    ) -> "Assembly":
        """With the network and the batches that the flags describe."""
        spec = models.NetworkSpec(
            model=arguments.model,
            hidden=arguments.hidden,
            input_shape=data.x_train.shape[1:],
            num_classes=data.num_classes,
            seed=seed,
        )
        return cls(method, hyperparameters, spec, data, arguments.batch_size)

    def transformation(self, planned: Replicas) -> optax.GradientTransformationExtraArgs:
        """Builds the transformation.

        Raises:
          UsageError: If there are too few examples for a step of all replicas, or a hyperparameter is of
            the wrong type or out of range.
        """
        if self.batch_size * planned.size > len(self.data.x_train):
            each = f" on each of {planned.size} devices" if planned.size > 1 else ""
            raise UsageError(
                f"--batch-size {self.batch_size}{each} is more than the {len(self.data.x_train)} "
                "training examples. Choose a smaller one."
            )
        facts = {
            "seed": self.spec.seed,
            "num_data": len(self.data.x_train),
            # Of one gradient.
            "batch_size": self.batch_size * (1 if self.method.period else planned.size),
            "axis_name": planned.axis_name,
        }
        try:
            return self.method.transformation(self.hyperparameters, facts)
        except (ValueError, TypeError) as error:
            raise UsageError(f"{self.method.name}: {error}") from error

    def trainer(
        self, tx: optax.GradientTransformationExtraArgs, initial: optax.Params, group: Replicas
    ) -> training.Trainer:
        """Compiles the training from some initial params."""
        method = self.method
        return training.Trainer(
            models.build(self.spec),
            tx,
            initial,
            self.data,
            batch_size=self.batch_size,
            seed=self.spec.seed,
            replicas=group,
            own_state=method.spreads or method.period is not None,
            trained=self._what_is_trained,
            epoch_start=functools.partial(method.epoch_start, **self.hyperparameters),
            phase=functools.partial(method.phase, **self.hyperparameters),
        )

    def gradient_evaluations(self, last: training.EpochRecord, group: Replicas) -> int:
        """How many gradients of the loss on one example it took to get to the last record.

        A full gradient takes as many as there are training examples.
        """
        starts = (
            self.method.epoch_start(epoch, **self.hyperparameters)
            for epoch in range(1, last.epoch + 1)
        )
        examples = last.step * self.batch_size * group.size
        return int(examples * self.method.gradients_a_step(**self.hyperparameters)) + len(
            self.data.x_train
        ) * sum(start is not None for start in starts)

    def _what_is_trained(self, params: optax.Params, opt_state: Any) -> optax.Params:
        if self.method.period is not None:
            return optperm.center_params(opt_state)
        if self.method.permutes:
            return optperm.permuted_params(opt_state, params)
        return params
