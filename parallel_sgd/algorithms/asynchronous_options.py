"""The options of asynchronous SGD, and what follows from them alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, cast

from ..embedding import Embedding
from ..errors import UserError
from ..parameter_server import (
    CURRENCIES,
    DISPATCH,
    MERGES,
    MODES,
    ROLES,
    Currency,
    Merge,
    Mode,
    Placement,
    Role,
    Rules,
    place,
)
from ..parameters import Parameters
from ..validation import checked_path, choice, integer, number, require_use_of, settle, shown
from .algorithm import StateT
from .compressed import CompressedAlgorithm

RAMPS = ("staircase", "linear")


@dataclass(frozen=True, kw_only=True)
class AsynchronousAlgorithm(CompressedAlgorithm[StateT]):
    """Options of workers and parameter servers, beside those of `CompressedAlgorithm`.

    Args:
        servers: how many ranks serve, the last ones; 0: all, each in a thread beside its training.
            If not given: as `parallel-sgd run --servers` says, or one.
        role: "worker" or "server" for this rank, where each is started apart (``mpiexec -n 1 …
            --role server : -n 4 … --role worker``); "auto": by `servers`.
        mode: "async": a push is applied and answered at once; "bounded": applied at once, and
            answered when its worker is at most `staleness` pushes ahead of the slowest; "sync": one
            push of every worker is merged with the others', applied as one, and answered; "geo":
            as async, for deltas that are averaged.
        staleness: how many pushes a worker may be ahead of the slowest, with mode "bounded".
        currency: what is pushed: "gradients", which the servers' optimizer applies, or "deltas",
            what a worker's own optimizer has changed; gradients if not given, and with "geo"
            deltas.
        merge: "sum": every push counts in full, so that K workers go K times as far with as many
            samples: lower the learning rate; "mean": the pushes of K workers count for one (in mode
            "sync" weighted by samples, elsewhere by 1/K each). If not given, "mean" in the modes
            "sync" and "geo", and else "sum".
        sync_period: samples of each worker in a period (on average, where they are uneven). Give
            at most one of the two; 256 if none is given.
        sync_steps: minibatches in a period.
        pipeline: push and pull in the background while the next period is computed; what is pulled
            is one period older.
        delay_compensation: the factor λ of DC-ASGD: a gradient g of a model x_then that is x by now
            counts as g + λ g² (x - x_then). For gradients that are applied one by one; 0: none.
        ramp_coefficient: with ramp_minibatches, and more than 0: the part of the learning rate that
            training begins with.
        ramp_minibatches: of a worker, after which the learning rate is raised by another such part
            (ramp "staircase"), or is whole (ramp "linear"); 0: it is whole from the start.
        ramp: "staircase": after s minibatches the factor is min(1, a (⌊s/m⌋ + 1)); "linear":
            min(1, a + (1 - a) s/m); a = ramp_coefficient, m = ramp_minibatches.
        placement: which server gets a slice of the model: "round-robin", or "hash" of its name. In
            Python also a function of its name, its number, and the number of servers.
        slice_parameters: whether parameters are cut into slices, and not kept whole.
        min_block: a parameter is cut into no more slices than it has so many values.
        tables: distributed embedding tables (`Embedding`).
        record: a folder, to which every server writes the order in which it answers workers.
        replay: a folder that was recorded: servers answer in the same order, so that the run
            repeats bit for bit, also in `parallel-sgd simulate`.

    Of `gradient_bits`, one number: of pushes; what is pulled has full precision.
    """

    servers: int | None = None
    role: Role = field(default="auto", repr=False, compare=False)
    mode: Mode = "async"
    staleness: int = 4
    currency: Currency | None = None
    merge: Merge | None = None
    sync_period: int | None = None
    sync_steps: int | None = None
    pipeline: bool = False
    delay_compensation: float = 0.0
    ramp_coefficient: float = 0.1
    ramp_minibatches: int = 0
    ramp: str = "staircase"
    placement: str | Callable[[str, int, int], int] = "round-robin"
    slice_parameters: bool = True
    min_block: int = 8192
    tables: tuple[Embedding, ...] = field(default=(), metadata={"python_only": True})
    record: str | None = field(default=None, metadata={"metavar": "FOLDER"})
    replay: str | None = field(default=None, metadata={"metavar": "FOLDER"})

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.gradient_bits, Mapping):
            bits = shown(dict(self.gradient_bits))
            raise UserError(f"gradient_bits={bits} must be one number for {type(self).__name__}")
        mode = choice("mode", self.mode, MODES)
        deltas_only = mode == "geo"
        currency = self.currency
        if currency is None:
            currency = "deltas" if deltas_only else "gradients"
        currency = choice("currency", currency, CURRENCIES)
        if deltas_only and currency != "deltas":
            raise UserError(f"currency={currency!r} must be 'deltas' with mode='geo'")
        merge = self.merge
        if merge is None:
            merge = "mean" if mode in ("sync", "geo") else "sum"
        compensation = number("delay_compensation", self.delay_compensation, 0)
        if compensation and (currency == "deltas" or mode == "sync"):
            raise UserError(
                f"delay_compensation={compensation:g} needs pushed gradients that are stale; here "
                f"mode={mode!r} and currency={currency!r}"
            )
        if self.sync_period is not None and self.sync_steps is not None:
            raise UserError(
                f"sync_period={self.sync_period} and sync_steps={self.sync_steps}: at most one of "
                "them may be given"
            )
        if self.record is not None and self.replay is not None:
            raise UserError(
                f"record={self.record!r} and replay={self.replay!r}: at most one of them may be "
                "given"
            )
        for name in ("record", "replay"):
            if getattr(self, name) is not None:
                settle(self, **{name: str(checked_path(name, getattr(self, name)))})
        period = 256 if self.sync_period is None else self.sync_period
        servers = None if self.servers is None else integer("servers", self.servers, 0)
        settle(
            self,
            servers=servers,
            role=choice("role", self.role, ROLES),
            mode=mode,
            staleness=integer("staleness", self.staleness, 0),
            currency=currency,
            merge=choice("merge", merge, MERGES),
            sync_period=None if self.sync_steps is not None else integer("sync_period", period, 1),
            sync_steps=None
            if self.sync_steps is None
            else integer("sync_steps", self.sync_steps, 1),
            pipeline=choice("pipeline", self.pipeline, (False, True)),
            delay_compensation=compensation,
            ramp_coefficient=_coefficient(self.ramp_coefficient),
            ramp_minibatches=integer("ramp_minibatches", self.ramp_minibatches, 0),
            ramp=choice("ramp", self.ramp, RAMPS),
            placement=_placement(self.placement),
            slice_parameters=choice("slice_parameters", self.slice_parameters, (True, False)),
            min_block=integer("min_block", self.min_block, 1),
            tables=_tables(self.tables),
        )
        require_use_of(self, "staleness", mode == "bounded", "mode='bounded'")
        for name in ("ramp_coefficient", "ramp"):
            require_use_of(self, name, self.ramp_minibatches > 0, "ramp_minibatches")
        require_use_of(self, "min_block", self.slice_parameters, "slice_parameters=True")
        # No buckets are cut here: blocks are those of quantization alone.
        require_use_of(self, "block_size", self.may_use(1, 2, 4, 8), "gradient_bits of 1 to 8")

    agrees: ClassVar[bool] = False

    @property
    def apart(self) -> bool:
        """Whether workers go through the data each at its own pace."""
        return self.mode != "sync"

    @property
    def ordered(self) -> dict[str, str]:
        """The options on which it depends what workers ask for, and when."""
        apart = {"servers", "role", "record", "replay"}
        return {f.name: repr(getattr(self, f.name)) for f in fields(self) if f.name not in apart}

    def period_ends(self, steps: int, samples: int, workers: int) -> bool:
        """Whether a period ends with so many minibatches, and samples of all workers."""
        if self.sync_steps is not None:
            return steps >= self.sync_steps
        assert self.sync_period is not None
        return samples >= self.sync_period * workers

    def ramp_factor(self, minibatches: int) -> float:
        """Of the learning rate, after so many minibatches of a worker."""
        a, m = self.ramp_coefficient, self.ramp_minibatches
        if m == 0:
            return 1.0
        if self.ramp == "linear":
            return min(1.0, a + (1 - a) * minibatches / m)
        return min(1.0, a * (minibatches // m + 1))

    def place(self, parameters: Parameters, servers: int) -> Placement:
        """Which server holds which part of a model. Local."""
        return place(
            parameters.shapes,
            servers,
            dispatch=self.placement,
            slice_parameters=self.slice_parameters,
            min_block=self.min_block,
        )

    @property
    def rules(self) -> Rules:
        """What becomes of pushes."""
        return Rules(
            mode=self.mode,
            currency=cast(Currency, self.currency),
            merge=cast(Merge, self.merge),
            staleness=self.staleness,
            delay_compensation=self.delay_compensation,
            pipeline=self.pipeline,
            codec=self.codec(cast(int, self.gradient_bits)),
        )


class PlacementFunction:
    """A user's function, named alike on all ranks; what it says must agree too."""

    def __init__(self, function: Callable[[str, int, int], int]) -> None:
        self.function: Callable[[str, int, int], int] = function

    def __call__(self, label: str, number: int, servers: int) -> int:
        return self.function(label, number, servers)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PlacementFunction) and other.function == self.function

    def __hash__(self) -> int:
        return hash(self.function)

    def __repr__(self) -> str:
        return str(getattr(self.function, "__qualname__", type(self.function).__qualname__))


def _placement(given: Any) -> str | PlacementFunction:
    if isinstance(given, PlacementFunction):
        return given
    if callable(given):
        return PlacementFunction(given)
    return choice("placement", given, tuple(DISPATCH))


def _coefficient(value: Any) -> float:
    try:
        coefficient = number("ramp_coefficient", value, 0, most=1)
    except UserError:
        coefficient = 0.0
    if coefficient == 0:
        raise UserError(f"ramp_coefficient={shown(value)} must be more than 0 and at most 1")
    return coefficient


def _tables(tables: Any) -> tuple[Embedding, ...]:
    if not isinstance(tables, Sequence) or not all(isinstance(each, Embedding) for each in tables):
        raise UserError(f"tables={shown(tables)} must be a sequence of Embedding")
    names = [each.name for each in tables]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"tables: two of them have the name {name!r}")
    return tuple(tables)
