"""What workers push, and what becomes of it."""

from __future__ import annotations

from typing import Literal

from ..compression import Codec, CompressionOptions, GradientBits
from ..errors import UserError
from ..options import Choice, Options, Real, Whole, group, option, options
from ..validation import set_validated

Mode = Literal["async", "bounded", "sync", "geo"]
PushType = Literal["gradients", "deltas"]
Merge = Literal["sum", "mean"]

MODES: tuple[Mode, ...] = ("async", "bounded", "sync", "geo")
PUSH_TYPES: tuple[PushType, ...] = ("gradients", "deltas")
MERGES: tuple[Merge, ...] = ("sum", "mean")


@options
class Rules(Options):
    """The options of pushes."""

    gradient_bits: float = option(
        32, GradientBits(), "bits a value of pushes; what is pulled has full precision"
    )
    compression: CompressionOptions = group(CompressionOptions)
    mode: Mode = option(
        "async",
        Choice(*MODES),
        "async: a push is applied and answered at once; bounded: applied at once, and answered "
        "when its worker is at most staleness pushes ahead of the slowest; sync: one push of every "
        "worker is merged with the others', applied as one, and answered; geo: as async, for "
        "model updates that are averaged",
    )
    staleness: int = option(
        4,
        Whole(),
        "how many pushes a worker may be ahead of the slowest, with mode bounded",
    )
    currency: PushType | None = option(
        None,
        Choice(*PUSH_TYPES),
        "the push type: gradients, which the servers' optimizer applies, or deltas, the model "
        "updates of a worker's own optimizer; gradients if not given, and with geo deltas",
    )
    merge: Merge | None = option(
        None,
        Choice(*MERGES),
        "sum: every push counts in full, so that K workers go K times as far with as many samples: "
        "lower the learning rate; mean: the pushes of K workers count for one (in mode sync "
        "weighted by samples, elsewhere by 1/K each). If not given mean in the modes sync and geo, "
        "and else sum",
    )
    pipeline: bool = option(
        False,
        Choice(False, True),
        "push and pull in the background while the next period is computed; what is pulled is one "
        "period older",
    )
    delay_compensation: float = option(
        0.0,
        Real(),
        "the factor of DC-ASGD: a gradient g of a model x_then that is x by now counts as "
        "g + factor * g^2 (x - x_then); for gradients that are applied one by one; 0: none",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        model_updates_only = self.mode == "geo"
        if self.currency is None:
            set_validated(self, currency="deltas" if model_updates_only else "gradients")
        if model_updates_only and self.currency != "deltas":
            raise UserError(f"currency={self.currency!r} must be 'deltas' with mode='geo'")
        if self.merge is None:
            set_validated(self, merge="mean" if self.mode in ("sync", "geo") else "sum")
        if self.delay_compensation and (self.currency == "deltas" or self.mode == "sync"):
            raise UserError(
                f"delay_compensation={self.delay_compensation:g} needs pushed gradients that are "
                f"stale; here mode={self.mode!r} and currency={self.currency!r}"
            )
        self.require_use("staleness", self.mode == "bounded", "mode='bounded'")
        self.compression.require_use_with({self.gradient_bits})
        # No buckets are cut here: blocks are those of quantization alone.
        few = self.gradient_bits < 16
        self.compression.require_use("block_size", few, "gradient_bits of 8 or less")

    @property
    def codec(self) -> Codec:
        """Of pushes."""
        return self.compression.codec(self.gradient_bits)

    @property
    def pushes_updates(self) -> bool:
        """Whether model updates are pushed, and not gradients."""
        return self.currency == "deltas"
