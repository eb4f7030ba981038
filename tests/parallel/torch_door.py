"""The conformance suite's learner with a PyTorch model: backward in place of a filled vector."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

import parallel_sgd as psgd
from parallel_sgd import Algorithm, Communicator, Parameters
from parallel_sgd.optimizers import Optimizer
from parallel_sgd.torch.optimizer.update_rule import TorchStep


class AsModule(nn.Module):
    """Parameters that are given, by their names."""

    def __init__(self, parameters: Parameters) -> None:
        super().__init__()
        for name, array in parameters.items():
            self.register_parameter(name, nn.Parameter(torch.from_numpy(array.copy())))


class ThroughTorch(psgd.torch.Learner):
    """Trains the suite's parameters as a PyTorch model's, with ``torch.optim.SGD``.

    The suite fills in the sum of a minibatch's gradients; the loss of `step` has that gradient, as
    a mean over the samples, and PyTorch computes it.
    """

    def __init__(
        self,
        parameters: Parameters,
        optimizer: Optimizer,
        algorithm: Algorithm[Any],
        comm: Communicator,
        **options: Any,
    ) -> None:
        assert isinstance(optimizer, psgd.SGD) and optimizer.lr is not None
        self.suites, self.rule = parameters, optimizer
        model = AsModule(parameters)
        own = optimizer
        if not algorithm.optimizer_on_servers:
            own = torch.optim.SGD(model.parameters(), lr=optimizer.rate_after(0))
        super().__init__(model, own, algorithm, comm, **options)

    def step(self, samples: int) -> int:
        if isinstance(self.local_step, TorchStep):  # as a scheduler sets it
            (group,) = self.local_step.torch_optimizers[0].param_groups
            group["lr"] = self.rule.rate_after(self.samples)
        if samples:
            mean = self.gradient.like()
            mean.flat[...] = self.gradient.flat / np.asarray(samples, self.gradient.dtype)
            loss = sum(
                (p * torch.from_numpy(mean[name])).sum()
                for name, p in self.model.named_parameters()
            )
            loss.backward()
        return super().step(samples)
