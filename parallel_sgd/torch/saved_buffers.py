"""Copies of a module's buffers: forward passes change buffers before a gradient can be checked."""

from __future__ import annotations

import torch
from torch import nn

from .module import buffers_of


class SavedBuffers:
    """Save buffers such as BatchNorm's statistics, and restore them if a minibatch is skipped.

    Args:
        model: the module of the buffers.

    Local. Memory: a copy of the buffers.
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

    def restore(self) -> None:
        for name, buffer in buffers_of(self._model):
            copy = self._copies.get(name)
            if copy is not None and copy.shape == buffer.shape:
                buffer.copy_(copy)
