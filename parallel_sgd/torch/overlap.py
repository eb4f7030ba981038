"""Overlap of communication with backward: gradients are exchanged as soon as they are complete."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import ref

import torch

from ..errors import UserError
from ..parameters import Parameters
from .arrays import finish_on_stream
from .module import FlatModule, put

Array = Any  #: a NumPy or CuPy array


class Overlap:
    """Report each gradient to an algorithm as soon as backward has completed it.

    A gradient counts by the samples of its minibatch. These are known in `step`, but not yet during
    backward. So a gradient is sent with an expected weight: the samples of the minibatch that the
    sampler has issued, or of the step before. If the expected weight was wrong on some rank, all
    ranks exchange the rest, (samples - weight) times the gradient, in a second exchange. A copy of
    the sent gradients is kept until `step` for that purpose.

    Args:
        module: the module of the gradients.
        ready: called with a parameter's name when its gradient is complete.
        expected: maps a number of backwards to the expected weight of the next gradients. None as
            the result: the weight is unknown, and nothing is sent before `step`.

    Attributes:
        first: a copy of the first gradient that was sent for the latest gathered step.

    Local. Memory: a second gradient.
    """

    def __init__(
        self,
        module: FlatModule,
        ready: Callable[[str], None],
        expected: Callable[[int], float | None],
    ) -> None:
        self._module, self._ready, self._expected = module, ready, expected
        self._weight: float | None = None
        self._sent: set[str] = set()
        self._paused, self._backwards, self._begun = False, 1, False
        self.first: torch.Tensor | None = None
        self._first: torch.Tensor | None = None
        self._copy = module.gradient.like()
        self._copy_is_late = False
        views, copies = (module.views_of(g.flat) for g in (module.gradient, self._copy))
        self._hooks = [  # run after the module's hook has filled the view
            p.register_post_accumulate_grad_hook(self._hook(number, name, view, copy))
            for number, ((name, p), view, copy) in enumerate(
                zip(module.tensors.items(), views, copies, strict=True)
            )
        ]

    def release(self) -> None:
        """Remove all hooks. Local."""
        for hook in self._hooks:
            hook.remove()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Send nothing during a `with` block, for a backward whose gradients accumulate. Local."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False
            self._backwards += 1

    def gather(self, factor: float) -> tuple[list[bool], bool]:
        """Complete the gradient of the minibatch, as `FlatModule.gather` does.

        Args:
            factor: the actual weight.
        Returns:
            For each parameter, whether it had a gradient; and whether this rank has a late part.
        """
        weight, sent, first = self._weight, self._sent, self._first
        self.reset()
        self.first = first
        used = self._module.gather(factor, done=sent)
        if not sent or weight == factor:
            return used, False
        assert weight is not None
        copies = self._module.views_of(self._copy.flat)
        for name, copy in zip(self._module.tensors, copies, strict=True):
            if name in sent:
                copy.mul_(factor - weight)
            else:
                copy.zero_()
        self._copy_is_late = True
        return used, True

    def require_nothing_sent(self) -> None:
        """Check that a minibatch without samples had no backward. Local.

        Raises:
            UserError: gradients of this minibatch have been sent.
        """
        if self._sent:
            raise UserError(
                "samples=0, but backward has been called, and with overlap=True its gradients are "
                "being exchanged already: a rank without samples must not call backward"
            )

    def reset(self) -> None:
        """Reset at the end of a minibatch, or for a minibatch without samples. Local."""
        self._weight, self._sent, self._backwards, self._begun = None, set(), 1, False
        self._first = self.first = None
        self._copy_is_late = False

    def late(self) -> Parameters:
        """Return this rank's vector for the second exchange: zeros if it has no late part.
        Local.
        """
        if not self._copy_is_late:
            self._copy.flat.fill(0)
        return self._copy

    def _hook(
        self, number: int, name: str, view: torch.Tensor, copy: torch.Tensor
    ) -> Callable[[torch.Tensor], None]:
        own = ref(self)  # weak: avoids a reference cycle of model and learner

        def complete(parameter: torch.Tensor) -> None:
            overlap = own()
            if overlap is not None and not overlap._paused:
                if parameter.grad is not view:  # has a graph, or was set by the program
                    put(parameter.grad, view)
                    parameter.grad = view
                overlap._complete(name, view, copy)
                overlap._module.versions[number] = view._version

        return complete

    def _complete(self, name: str, view: torch.Tensor, copy: torch.Tensor) -> None:
        """Send a parameter's gradient, which is complete in its view."""
        if not self._begun:
            self._weight, self._begun = self._expected(self._backwards), True
        if self._weight is None:
            return
        if name in self._sent:
            raise UserError(
                f"the gradient of {name!r} is being exchanged, and backward computes it again: "
                "with overlap=True all but the last backward of a step must be in a `with "
                "learner.no_sync():` block, checkpoints of activations must have "
                "use_reentrant=False, and a backward that has failed cannot be repeated"
            )
        copy.copy_(view)
        if not self._sent:
            self._first = copy
        if self._weight != 1:
            view.mul_(self._weight)
        self._sent.add(name)
        finish_on_stream(view)
        self._ready(name)
