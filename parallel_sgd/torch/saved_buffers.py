"""A module's buffers as they were: forward passes change them before anybody sees a gradient."""

from __future__ import annotations

import torch
from torch import nn

from .module import buffers_of


class SavedBuffers:
    """The statistics of BatchNorm and the like, to be put back where a minibatch is left out.

    Args:
        model: whose.

    Local. Memory: a copy of them.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._copies: dict[str, torch.Tensor] = {}

    def take(self) -> None:
        before = self._copies
        self._copies = {}
        for name, buffer in buffers_of(self._model):
            copy = before.get(name)
            if copy is None or copy.shape != buffer.shape:
                copy = torch.empty_like(buffer)
            self._copies[name] = copy.copy_(buffer)

    def put_back(self) -> None:
        for name, buffer in buffers_of(self._model):
            copy = self._copies.get(name)
            if copy is not None and copy.shape == buffer.shape:
                buffer.copy_(copy)
