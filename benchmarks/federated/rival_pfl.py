"""``python -m benchmarks.federated.rival_pfl``: pfl-research's federated averaging in one process."""

from __future__ import annotations

import functools
import time
from typing import Any

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import MinimizeReuseUserSampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.federated import rivals


class Stamp(TrainingProcessCallback):
    """When each round ended."""

    def __init__(self) -> None:
        """Begin with none."""
        self.stamps: list[float] = []

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: Any, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        """Note the time and go on."""
        self.stamps.append(time.perf_counter())
        return False, Metrics()


class Net(nn.Module):
    """A net with the loss and metrics that pfl asks for."""

    def __init__(self, name: str) -> None:
        """Take its name."""
        super().__init__()
        self.layers = rivals.net(name)

    def forward(self, x: Tensor) -> Tensor:
        """Rows -> logits."""
        result: Tensor = self.layers(x)
        return result

    def loss(self, inputs: Tensor, targets: Tensor, is_eval: bool = False) -> Tensor:
        """Mean cross-entropy of a batch."""
        self.train(not is_eval)
        return functional.cross_entropy(self(inputs), targets)

    @torch.no_grad()
    def metrics(self, inputs: Tensor, targets: Tensor, is_eval: bool = True) -> dict[str, Any]:
        """Loss, weighted by rows."""
        return {"loss": Weighted(float(self.loss(inputs, targets, is_eval)) * len(targets), len(targets))}


def train(name: str) -> list[float]:
    """Rounds of federated averaging; seconds between their ends."""
    ids = list(range(rivals.CLIENTS))
    data = FederatedDataset(
        lambda client: Dataset(raw_data=list(rivals.rows_of(name, client)), user_id=str(client)),
        MinimizeReuseUserSampler(ids),
    )
    net = Net(name)
    model = PyTorchModel(
        model=net, local_optimizer_create=functools.partial(torch.optim.SGD, momentum=0.9, weight_decay=1e-4),
        central_optimizer=torch.optim.SGD(net.parameters(), lr=1.0),
    )  # fmt: skip
    stamp = Stamp()
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=rivals.ROUNDS, evaluation_frequency=10**6, train_cohort_size=rivals.COHORT,
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(training_data=data, val_data=data), model=model,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=rivals.EPOCHS, local_learning_rate=rivals.RATE, local_batch_size=rivals.BATCH
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=1024), callbacks=[stamp],
    )  # fmt: skip
    return rivals.gaps(stamp.stamps)


if __name__ == "__main__":
    rivals.serve(train)
