"""PyTorch optimizers as the local update rule of every algorithm."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

from ...errors import UserError
from ...local_step import LocalStep, OptimizerState, UpdateRule
from ...optimizers import Optimizer
from ...options import option, options
from ...parameters import Parameters
from ..arrays import as_tensor
from ..module import FlatModule
from ..refusals import require_optimizers_of
from ..scaling import Scaling
from .adam_correction import AdamCorrection, corrected_groups
from .comparable import comparable, state_fingerprint
from .state import TorchOptimizerState
from .vectors import optimizers_of

Array = Any  #: a NumPy or CuPy array


@options
class TorchOptimizer(UpdateRule):
    """PyTorch optimizers with their parameter groups, as compared between ranks.

    Each optimizer steps on its own part of the parameters. Made by `wrapped`; `bind` returns its
    `TorchStep`.
    """

    kind: str = option("", None, "the class of each optimizer")
    groups: str = option("", None, "how many parameters each group of each optimizer has")
    hyperparameters: str = option("", None, "of each group")

    @classmethod
    def wrapped(cls, optimizers: list[Any], module: FlatModule, *, mean: bool) -> TorchOptimizer:
        """Wrap optimizers of a module's parameters.

        Args:
            optimizers: PyTorch's.
            module: the module of the parameters.
            mean: whether the optimizers get the mean gradient over all samples, or the sum.
        Raises:
            UserError: the optimizers cannot train the module.
        """
        require_optimizers_of(optimizers, module.names, module.tensors)
        groups = [one.param_groups for one in optimizers]
        made = cls(
            kind=" + ".join(type(one).__name__ for one in optimizers),
            groups=" + ".join(
                ", ".join(str(len(group["params"])) for group in own) for own in groups
            ),
            hyperparameters=comparable(
                [
                    {name: v for name, v in group.items() if name != "params"}
                    for group in chain(*groups)
                ]
            ),
        )
        set_aside = {"optimizers": optimizers, "module": module, "mean": mean}
        for name, value in set_aside.items():
            object.__setattr__(made, f"_{name}", value)
        return made

    def bind(self, parameters: Parameters) -> TorchStep:
        module: FlatModule = self._module  # type: ignore[attr-defined]
        assert parameters is module.parameters
        return TorchStep(self, module, self._optimizers, mean=self._mean)  # type: ignore[attr-defined]

    def reset(self, state: OptimizerState) -> None:
        assert isinstance(state, TorchOptimizerState)
        state.reset()

    def rate_after(self, samples: int) -> float | None:
        """Return the present learning rate of the first optimizer's first parameter group."""
        rate = self._optimizers[0].param_groups[0].get("lr")  # type: ignore[attr-defined]
        return None if rate is None else float(rate)

    def mean_lr(self, state: OptimizerState, samples: float) -> float | None:
        rate = self.rate_after(state.samples)
        if rate is None:
            return None
        rate *= state.lr_factor
        return rate if self._mean else rate * samples  # type: ignore[attr-defined]

    def momentum_for(self, samples: float) -> float:
        """Return the largest momentum of all parameter groups, whatever `samples`."""
        every = (one.param_groups for one in self._optimizers)  # type: ignore[attr-defined]
        momenta = (float(group.get("momentum") or 0) for group in chain(*every))
        return max(momenta, default=0.0)

    @property
    def rate_is_per_sample(self) -> bool:
        return not self._mean  # type: ignore[attr-defined]

    @property
    def has_second_moment(self) -> bool:
        return any(map(corrected_groups, optimizers_of(self._optimizers)))  # type: ignore[attr-defined]

    @property
    def members(self) -> dict[str, str]:
        """The parameters of each optimizer, for comparison between ranks. Local."""
        names, texts = self._module.names, list[str]()  # type: ignore[attr-defined]
        for one in self._optimizers:  # type: ignore[attr-defined]
            held = [[names.get(p) for p in group["params"]] for group in one.param_groups]
            checksum = zlib.crc32(repr(held).encode())
            texts.append(f"{type(one).__name__} of {sum(map(len, held))} ({checksum:08x})")
        return {"parameters of the optimizer (with a checksum of names)": ", ".join(texts)}

    @property
    def fingerprint(self) -> dict[str, str]:
        """The optimizers' earlier training, for comparison between ranks. Local."""
        return state_fingerprint(self._optimizers)  # type: ignore[attr-defined]

    @property
    def lacks_rate(self) -> str | None:
        for one in self._optimizers:  # type: ignore[attr-defined]
            for number, group in enumerate(one.param_groups):
                if group.get("lr") is None:
                    kind = type(one).__name__
                    return f"{kind} has none (lr=None in parameter group {number})"
        return None


def rule_of(optimizer: Any, module: FlatModule, algorithm: Any, *, mean: bool) -> UpdateRule:
    """Return the update rule for optimizers of PyTorch, or for one of `parallel_sgd`. Local.

    Args:
        optimizer: either kind; of PyTorch's, one or a list of several.
        module: its parameters are to be updated.
        algorithm: the learner's.
        mean: see `TorchOptimizer.wrapped`.
    Raises:
        UserError: the optimizers cannot train the module with this algorithm.
    """
    optimizers = [*optimizer] if isinstance(optimizer, list | tuple) else [optimizer]
    if len(optimizers) == 1 and isinstance(optimizers[0], Optimizer):
        return optimizers[0]
    rule = TorchOptimizer.wrapped(optimizers, module, mean=mean)
    if getattr(algorithm, "optimizer_on_servers", False):
        raise UserError(
            f"optimizer {rule.kind} cannot step on servers, each of which has a part of the model: "
            "push model updates (currency='deltas'), or give one of parallel_sgd's optimizers"
        )
    return rule


class TorchStep(LocalStep):
    """The steps of PyTorch optimizers on a module.

    Args:
        optimizer: the update rule.
        module: its parameters are updated.
        torch_optimizers: PyTorch's optimizers. They step in this order.
        mean: whether the optimizers get the mean gradient over all samples, or the sum.

    Attributes:
        torch_optimizers: as given.
        unit: returns the number of samples represented by a gradient of 1.
        used: returns, for each parameter, whether any rank has a gradient; called once per step.
    """

    def __init__(
        self,
        optimizer: TorchOptimizer,
        module: FlatModule,
        torch_optimizers: Sequence[Any],
        *,
        mean: bool,
    ) -> None:
        self.optimizer, self.parameters = optimizer, module.parameters
        self.state: TorchOptimizerState = TorchOptimizerState.of(torch_optimizers, module)
        self.unit: Callable[[], float] = lambda: 1
        self.used: Callable[[], Sequence[bool]] = lambda: [True] * len(module.tensors)
        self.torch_optimizers = torch_optimizers
        self._module, self._mean, self._stepping = module, mean, False
        self._held = [*map(_parameters_held, torch_optimizers)]
        self._hooks = [
            one.register_step_pre_hook(self._require_own_step)
            for one in optimizers_of(torch_optimizers)
            if hasattr(one, "_optimizer_step_pre_hooks")  # set by PyTorch's __init__
        ]

    def compile(self) -> None:
        """Do nothing: PyTorch's step is not compiled. Local."""

    def first_calls(self, *, quantized: bool) -> list[Callable[[], object]]:
        """Return no calls: PyTorch's step uses no kernels of this package. Local."""
        return []

    def require_ready(self, scaling: Scaling | None) -> None:
        """Check that each optimizer has its original parameters, with unmodified gradients. Local.

        Args:
            scaling: the loss scale, if any.
        Raises:
            UserError: parameters were added, or gradients were unscaled.
        """
        for one, had in zip(self.torch_optimizers, self._held, strict=True):
            held = _parameters_held(one)
            if held != had:
                raise UserError(
                    f"optimizer {type(one).__name__} had {had} parameters when the learner was "
                    f"made, and has {held} now: add parameters before the learner is made"
                )
            if scaling is not None:
                scaling.require_scaled(one)

    def release(self) -> None:
        """Allow the program to call the optimizers' ``step`` again. Local."""
        for hook in self._hooks:
            hook.remove()

    def update(self, gradient: Array, samples: int, out: Array | None) -> None:
        assert out is None, "servers take no steps of PyTorch's optimizers"
        module, used = self._module, self.used()
        if self._mean and samples != self.unit():
            as_tensor(gradient).mul_(self.unit() / samples)
        views = module.views_of(gradient)
        for p, view, is_used in zip(module.tensors.values(), views, used, strict=True):
            p.grad = view if is_used else None
        self._stepping = True
        try:
            with self._rates_times(self.state.lr_factor), self.state.stepping():
                for one in self.torch_optimizers:
                    one.step()
                self._allow_for_quantization(samples)
        finally:
            self._stepping = False
        module.clear_gradients()
        self.state.adopt()

    def _allow_for_quantization(self, samples: int) -> None:
        """Correct a step of PyTorch's Adam for quantized gradients, as `optimizers.Adam` does."""
        quantized = self.state.quantized
        if quantized is not None:
            scale = self.unit() / samples if self._mean else 1.0
            optimizers = optimizers_of(self.torch_optimizers)
            adam = AdamCorrection(optimizers, self._module, self.state.correction)
            adam.correct(quantized.places)
            if quantized.projections is not None:
                adam.learn(quantized.projections * scale, self.state.steps + 1)

    @contextmanager
    def _rates_times(self, factor: float) -> Iterator[None]:
        """Multiply all learning rates, numbers or tensors, by a factor for a `with` block."""
        several = (one.param_groups for one in self.torch_optimizers) if factor != 1 else ()
        groups = [*chain.from_iterable(several)]
        if groups and (lacks := self.optimizer.lacks_rate):
            raise UserError(
                f"learning rates must be multiplied by {factor:g}, but optimizer {lacks}"
            )
        rates = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = group["lr"] * factor
        try:
            yield
        finally:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate

    def _require_own_step(self, optimizer: Any, *_: Any) -> None:
        if not self._stepping:
            kind = type(optimizer).__name__
            raise UserError(
                f"{kind}.step() was called, but learner.step(samples=...) takes the steps: a rank "
                "that steps alone has a different model from all other ranks"
            )


def _parameters_held(optimizer: Any) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)
