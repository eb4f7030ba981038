"""A recurrent model of the next byte."""

from __future__ import annotations

import torch
from torch import nn


class ByteLSTM(nn.Module):
    """An LSTM (Hochreiter and Schmidhuber, 1997) over embedded bytes.

    Args:
        width: of the embedding and of the LSTM's state.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits [n, bytes, 256] of the byte that follows each of x [n, bytes]."""
        states, _ = self.lstm(self.embedding(x))
        return self.head(states)
