"""Rules of pushes: their content, their encoding, and how servers apply them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, cast, get_args

import numpy as np

from ..communication import Communicator
from ..compression import AUTO, BitsOptions, Codec, GradientBits, Mixed, auto_bits
from ..costs import Measured, best_push_bits, measure
from ..errors import UserError
from ..options import BySamples, Choice, Real, Whole, option, options
from ..parameters import Parameters
from ..patterns import Patterns
from ..validation import set_validated
from .placement import Slice

Mode = Literal["async", "bounded", "sync", "geo"]
PushType = Literal["gradients", "deltas"]
Merge = Literal["sum", "mean"]


@options
class Rules(BitsOptions):
    """The options of pushes."""

    gradient_bits: float | str | Mapping[int, float] = option(
        32,
        BySamples(GradientBits(), words=(AUTO,)),
        "bits a value of pushes, or bits by the worker's sample count; pulls have full precision; "
        "auto: the fastest bits by a measurement of links and kernels before training, or more "
        "bits if these cost at most 5 % of the time",
    )
    mode: Mode = option(
        "async",
        Choice(*get_args(Mode)),
        "async: a push is applied and answered at once; bounded: applied at once, and answered "
        "when its worker is at most staleness pushes ahead of the slowest; sync: one push of "
        "every worker is merged into a single push, applied, and answered; geo: as async, for "
        "model updates to be averaged",
    )
    staleness: int = option(
        4,
        Whole(),
        "number of pushes by which a worker may be ahead of the slowest, with mode bounded",
    )
    currency: PushType | None = option(
        None,
        Choice(*get_args(PushType)),
        "the push type: gradients, which the servers' optimizer applies, or deltas, the model "
        "updates of a worker's own optimizer; gradients if not given, and with geo deltas",
    )
    merge: Merge | None = option(
        None,
        Choice(*get_args(Merge)),
        "sum: every push counts in full, so K workers go K times as far for the same samples: "
        "lower the learning rate; mean: the pushes of K workers count as one (in mode sync "
        "weighted by samples, else by 1/K each). If not given mean in the modes sync and geo, "
        "else sum",
    )
    pipeline: bool = option(
        False,
        Choice(False, True),
        "push and pull in the background while the next period is computed; pulled values are one "
        "period older",
    )
    delay_compensation: float = option(
        0.0,
        Real(),
        "the factor of DC-ASGD: a gradient g of a model x_then that is x by now counts as g + "
        "factor * g^2 (x - x_then); for gradients applied one by one; 0: none",
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
        # Pushes have no buckets: block_size matters for quantization only.
        few = any(bits == AUTO or cast(float, bits) < 16 for bits in self.all_bits)
        self.compression.require_use("block_size", few, "gradient_bits of 8 or less")

    @property
    def possible_bits(self) -> tuple[float, ...]:
        """Possible bits of a push, except for parameters with their own bits."""
        if AUTO in self.usual_bits:
            return auto_bits(of_blocks=self.pushes_updates)
        return tuple(sorted(cast(set[float], self.usual_bits)))

    def fewest(self, bits: float) -> float:
        """Return the fewest bits of any value in a push with `bits`. Local."""
        return min([bits, *self.bits_of.values()])

    def codec_of_part(
        self, bits: float, slices: Sequence[Slice], sizes: Mapping[str, int]
    ) -> Codec:
        """Return the codec of a push to a server.

        Args:
            bits: of the push.
            slices: the server's slices. The codec finds them by label.
            sizes: of all parameters, by name. A slice has the bits of its parameter.

        Local.
        """
        codec = self.codec(bits)
        if not isinstance(codec, Mixed):
            return codec
        own = {
            _pattern_of(slice_.label): its
            for slice_ in slices
            if (its := codec.own.value_of(slice_.name, sizes[slice_.name]))
        }
        return Mixed(others=codec.others, own=Patterns(own)) if own else codec.others

    @property
    def pushes_updates(self) -> bool:
        """True if workers push model updates instead of gradients."""
        return self.currency == "deltas"


def _pattern_of(label: str) -> str:
    """Return a pattern that matches only this text."""
    return "".join(f"[{c}]" if c in "*?[<" else c for c in label)


def choose_push_bits(
    world: Communicator,
    parameters: Parameters,
    largest: int,
    workers: int,
    block_size: int,
    possible: tuple[float, ...],
) -> tuple[float, Measured | None]:
    """Choose the bits for the shortest push to the server with the most values.

    Args:
        world: workers and servers.
        parameters: the model.
        largest: number of values on that server.
        workers: number of workers.
        block_size: of the codecs.
        possible: bits to choose from.
    Returns:
        The bits, and the measurement. The measurement is None if nothing was measured.

    Collective; the same on all ranks. Cost: some tenths of a second to measure links and kernels.
    Nothing is measured on a single rank, for an empty model, or for parameters of other dtypes than
    float32: the result is then 32.
    """
    if parameters.dtype != np.float32 or world.size == 1 or largest == 0:
        return 32, None
    ranks_of: dict[str, list[int]] = {}
    for rank, host in enumerate(world.hosts):
        ranks_of.setdefault(host, []).append(rank)
    hosts = list(ranks_of.values())
    measured = measure(world, hosts, block_size, parameters.flat, possible)
    return best_push_bits(largest, workers, measured, possible), measured
