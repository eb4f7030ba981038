"""The strategies for the package `pytorch_lightning`, which pickles them by these names."""

from typing import Any

from .packages import from_extra

with from_extra("LightningStrategy", "lightning"):
    from pytorch_lightning.strategies import DDPStrategy
    from pytorch_lightning.utilities.data import extract_batch_size

from .ddp_strategy import Compressed
from .learner_strategy import Learned


class GradientStrategy(Compressed, DDPStrategy):
    """Lightning's DDPStrategy with compressed gradients."""


class LearnerStrategy(Learned, DDPStrategy):
    """Lightning's DDPStrategy with a learner in place of DDP."""


def batch_size_of(batch: Any) -> int:
    """Return the number of samples in a batch, as Lightning estimates it. Local."""
    return int(extract_batch_size(batch))
