"""Gradients that are exchanged while backward still computes others."""

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
    """Tells an algorithm of each gradient that backward completes.

    A gradient counts by the samples of its minibatch, which are known when `step` is called, but
    not yet in backward. It is sent with the weight that is expected, those of the minibatch that a
    sampler has announced or of the step before; where that was wrong on a rank, all ranks exchange
    the rest, (samples - weight) times the gradient, a second time. So there is a copy of what was
    sent until `step`.

    Args:
        module: whose gradients.
        ready: called with the name of each parameter, when its gradient is there.
        expected: the weight of the next minibatch's gradients; None where nobody knows: then
            nothing is sent before `step`.

    Attributes:
        first: a copy of the gradient that was sent first, in the step that has gathered it.

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
        self._hooks = [  # after the module's own, which puts a gradient into its view
            p.register_post_accumulate_grad_hook(self._hook(number, name, view, copy))
            for number, ((name, p), view, copy) in enumerate(
                zip(module.tensors.items(), views, copies, strict=True)
            )
        ]

    def release(self) -> None:
        """Tell of nothing any more. Local."""
        for hook in self._hooks:
            hook.remove()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """For a backward after which another one adds to the same gradients. Local."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False
            self._backwards += 1

    def gather(self, factor: float) -> tuple[list[bool], bool]:
        """Complete the gradient of the minibatch, as `FlatModule.gather` does.

        Returns:
            Of each parameter, whether it had a gradient; and whether what was sent is not all.
        """
        weight, sent, first = self._weight, self._sent, self._first
        self.forget()
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
        """See that a minibatch without samples had no backward. Local."""
        if self._sent:
            raise UserError(
                "samples=0, but backward has been called, and with overlap=True its gradients are "
                "being exchanged already: a rank without samples must not call it"
            )

    def forget(self) -> None:
        """The minibatch is over, or has no samples. Local."""
        self._weight, self._sent, self._backwards, self._begun = None, set(), 1, False
        self._first = self.first = None
        self._copy_is_late = False

    def late(self) -> Parameters:
        """What is exchanged a second time: zeros, unless this rank has such. Local."""
        if not self._copy_is_late:
            self._copy.flat.fill(0)
        return self._copy

    def _hook(
        self, number: int, name: str, view: torch.Tensor, copy: torch.Tensor
    ) -> Callable[[torch.Tensor], None]:
        own = ref(self)  # else a model and a learner that nobody holds would hold each other

        def complete(parameter: torch.Tensor) -> None:
            overlap = own()
            if overlap is not None and not overlap._paused:
                if parameter.grad is not view:  # it has a graph, or the program has put it there
                    put(parameter.grad, view)
                    parameter.grad = view
                overlap._complete(name, view, copy)
                overlap._module.versions[number] = view._version

        return complete

    def _complete(self, name: str, view: torch.Tensor, copy: torch.Tensor) -> None:
        """Backward has a parameter's gradient, in its view."""
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
