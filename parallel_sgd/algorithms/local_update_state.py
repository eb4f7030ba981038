"""The state of local updates: the blocks of each part of the model, and the common model."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from ..exchange import Exchange
from ..state import across, workspace
from .exchange_state import ExchangeState
from .rounds import Rounds

Array = Any  #: a NumPy or CuPy array


@dataclass(kw_only=True)
class Fragment:
    """The blocks of one part of the model.

    Attributes:
        samples: of all ranks, in the present block so far.
        own_samples: of this rank, in the present block so far.
        steps: minibatches in the present block so far.
        sent_samples: of all ranks, in the block under way; 0 without such a block.
        sent_lr: learning rate of the last local step of the block under way: see
            `LocalUpdateState.lr`.
        blocks: ended so far.
        is_first: True in the first of several fragments' blocks, which is shorter.
        number: of the fragment.
        values: its slice of the vector.
        averaging: exchange of averaged inner states.
    """

    samples: int = across("same", least=0, default=0)
    own_samples: int = across("share", least=0, default=0)
    steps: int = across("same", least=0, default=0)
    sent_samples: int = across("same", least=0, default=0)
    sent_lr: float = across("same", least=0, default=0.0)
    blocks: int = across("same", least=0, default=0)
    is_first: bool = across("same", default=False)
    number: int = workspace()
    values: slice = workspace()
    averaging: Exchange | None = workspace()


@dataclass(kw_only=True)
class LocalUpdateState:
    """The state of local updates.

    Attributes:
        exchange: of pseudo-gradients.
        start: [n], Φ: the model common to all ranks at the latest synchronization.
        momentum: [n], of the outer step; None without momentum.
        sent: [n], with overlap: the pseudo-gradient under way, or this rank's part of it; else
            None.
        fragments: the parts of the model, by number as text.
        rounds: this rank's part in outer steps without late ranks; None without `quorum`.
        lr: learning rate for a mean gradient, of the latest local step; 0 unless the outer step
            divides by the rate.
        warm: True before the first step. During a warm start all ranks train the same model.
    """

    exchange: ExchangeState
    start: Array = across("same")
    momentum: Array | None = across("same")
    sent: Array | None = across("same")
    fragments: dict[str, Fragment]
    rounds: Rounds | None = workspace(default=None)
    lr: float = across("same", least=0, default=0.0)
    warm: bool = across("same", default=True)

    @property
    def parts(self) -> Collection[Fragment]:
        """The fragments, in the order of the vector."""
        return self.fragments.values()

    @property
    def weight(self) -> dict[str, int]:
        """Weight of this rank's model in a mean of the ranks' models, by the end of a part."""
        return {str(part.values.stop): part.own_samples for part in self.parts}
