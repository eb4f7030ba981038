"""A module whose trainable parameters are views of one flat vector, and their gradients, too."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from typing import Any
from weakref import ref

import torch
from torch import nn

from ..errors import UserError
from ..parameters import Parameters
from .arrays import as_array, as_tensor, checksum_of
from .refusals import require_dense, require_equal, require_plain

Array = Any  #: a NumPy or CuPy array

MAKE_ANEW = "make the learner after the model is complete, or close this one and make another"

FEW = 16  #: values of a gradient that are compared

_wrapped: dict[int, ref[Any]] = {}
"""Parameters that are views of a learner's vector at present, by their ids."""


class FlatModule:
    """Makes a module's parameters views of one vector, and their gradients views of another.

    The parameters stay the same objects, so that optimizers, tied weights and hooks go on as they
    are. Frozen ones (``requires_grad=False``) are left alone. Backward makes a tensor of its own of
    each gradient; as soon as it is complete it is moved to its place in the vector, while it is
    still in the processor's caches, and its memory is free for the next one.

    Args:
        module: any `nn.Module` with trainable parameters, all of one dtype, float32 or float64, on
            one device.
    Raises:
        UserError: it is not, or its buffers or parameters are not plain.

    Attributes:
        parameters: the trainable ones by name, each once, in the order of ``named_parameters()``.
        tensors: the same as PyTorch knows them.
        device: of them all.
        gradient: of the same layout, where backward leaves gradients: see `attach_gradient`.
        backwards: by parameter, how many have added to its gradient since it was gathered or
            zeroed. (One with a graph of its own is not counted.)
        versions: by parameter, PyTorch's count of changes to its part of `gradient`, as backward
            has left it.
        left: some of the values that backward has left: see `changed`.

    Local. Memory: a vector in place of the parameters' own memory.
    """

    def __init__(self, module: nn.Module) -> None:
        require_plain(module)
        self.module = module
        self.tensors = {
            plain_name(name): p for name, p in module.named_parameters() if p.requires_grad
        }
        require_equal(self.tensors)
        require_dense(buffers_of(module))
        self.device = next(iter(self.tensors.values())).device
        for name, tensor in self.tensors.items():
            if belongs_to_learner(tensor):
                raise UserError(
                    f"parameter {name!r} belongs to another learner already: close that one first"
                )
        self.parameters = Parameters({name: as_array(p) for name, p in self.tensors.items()})
        self.gradient: Parameters = None  # type: ignore[assignment]  # until `attach_gradient`
        self.backwards = [0] * len(self.tensors)
        self.versions = list(self.backwards)
        self.probe = GradientProbe()
        self._hooks: list[Any] = []
        for name, tensor in self.tensors.items():
            tensor.data = as_tensor(self.parameters[name])
            _wrapped[id(tensor)] = ref(tensor)
        self._places = [
            (owner, own_name, parameter)
            for owner in module.modules()
            for own_name, parameter in owner._parameters.items()
        ]
        self._counts = [
            (entries, len(entries))
            for owner in module.modules()
            for entries in (owner._parameters, owner._modules)
        ]
        self._children = [
            (owner._modules, [*owner._modules.values()])
            for owner in module.modules()
            if owner._modules
        ]
        self._addresses = [(name, p, p.data_ptr()) for name, p in self.tensors.items()]
        self._frozen = [p for p in module.parameters() if not p.requires_grad]
        self._vectors: dict[int, tuple[Array, list[torch.Tensor]]] = {}

    def release(self) -> None:
        """Let another learner have the module; its parameters stay where they are. Local."""
        self._remove_hooks()
        for tensor in self.tensors.values():
            _wrapped.pop(id(tensor), None)

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def attach_gradient(self, gradient: Parameters) -> None:
        """From now on backward leaves gradients in a vector. Local.

        Args:
            gradient: of the parameters' layout.
        """
        self.gradient = gradient
        self._remove_hooks()
        views = self.views_of(gradient.flat)
        self.versions[:] = (view._version for view in views)
        self._hooks = [
            p.register_post_accumulate_grad_hook(
                _mover(number, view, self.backwards, self.versions, self.probe)
            )
            for number, (p, view) in enumerate(zip(self.tensors.values(), views, strict=True))
        ]

    def require_unchanged(self) -> None:
        """See that the module still has the parameters that it was wrapped with, in their places.

        Raises:
            UserError: one was added, replaced, resized, moved, frozen or made trainable.

        Local. Cost: under a microsecond a parameter.
        """
        for owner, name, parameter in self._places:
            if owner._parameters.get(name) is not parameter:
                raise UserError(
                    f"parameter {self._full_name(owner, name)!r} was replaced after the learner "
                    f"was made: {MAKE_ANEW}"
                )
        if any(len(entries) != count for entries, count in self._counts) or any(
            [*entries.values()] != had for entries, had in self._children
        ):
            known = {id(parameter) for _, _, parameter in self._places}
            new = [name for name, p in self.module.named_parameters() if id(p) not in known]
            if new:
                raise UserError(
                    f"parameter {new[0]!r} was added after the learner was made: {MAKE_ANEW}"
                )
        for name, p, address in self._addresses:
            if p.data_ptr() != address or not p.requires_grad:
                what = (
                    "was frozen" if p.data_ptr() == address else "was resized, moved or converted"
                )
                raise UserError(
                    f"parameter {name!r} {what} after the learner was made: {MAKE_ANEW}"
                )
        for p in self._frozen:
            if p.requires_grad:
                name = next(name for name, q in self.module.named_parameters() if q is p)
                raise UserError(
                    f"parameter {name!r} was frozen when the learner was made, and is trainable "
                    f"now: {MAKE_ANEW}"
                )

    def gather(self, factor: float, done: Container[str] = ()) -> list[bool]:
        """Complete `gradient`: all that backward has left, times a factor.

        Those of parameters without one become zero. The parameters have none afterwards.

        Args:
            done: names of parameters whose gradients are complete.
        Returns:
            Of each parameter, whether it had a gradient.

        Local. Cost: one pass over the gradient, unless the factor is 1.
        """
        used, scaled = [], []
        flat = self.gradient.flat
        for (name, p), view in zip(self.tensors.items(), self.views_of(flat), strict=True):
            gradient = p.grad
            used.append(gradient is not None)
            if not (done and name in done):
                if gradient is not view:  # none, or one that the program has put there
                    put(gradient, view)
                if done:
                    scaled.append(view)
            p.grad = None
        if factor != 1:  # all in one go, where all are to be scaled
            for part in scaled if done else (as_tensor(flat),):
                part.mul_(factor)
        self.backwards[:] = [0] * len(used)
        self.probe.values.clear()
        return used

    def changed(self, own_hooks: int, *, sent: bool) -> str | None:
        """The name of a parameter whose gradient the program has changed or replaced since backward
        has left it, so far as PyTorch counts changes and values in `probe` show it; None where
        there is none. Zeros, and a mean over the backwards that were added up, are no change.

        Args:
            own_hooks: that the learner has on each parameter. Where there are others, they may have
                done it, and nothing is said.
            sent: whether gradients are on their way already: then values are not what backward has
                left, and any change comes too late.

        Local. Cost: about 0.1 microseconds a parameter, and some 20 for each that PyTorch has
        counted a change of.
        """
        views = self.views_of(self.gradient.flat)
        for number, (name, p) in enumerate(self.tensors.items()):
            gradient, view = p.grad, views[number]
            if gradient is view:
                if view._version == self.versions[number]:
                    continue
            elif gradient is None or gradient.requires_grad or gradient.is_sparse:
                continue
            hooks = getattr(p, "_post_accumulate_grad_hooks", None) or ()
            backwards, before = self.backwards[number], self.probe.values.get(number)
            if not backwards or len(hooks) > own_hooks or not (sent or before is not None):
                continue
            now = _few_of(gradient)
            if now.any() and (sent or not _is_mean_of(before, now, backwards)):
                return name
        return None

    def has_gradients(self) -> bool:
        """Whether backward has left any. Local."""
        return any(p.grad is not None for p in self.tensors.values())

    def clear_gradients(self) -> None:
        """Forget what backward has left. Local."""
        for p in self.tensors.values():
            p.grad = None

    def views_of(self, vector: Array) -> list[torch.Tensor]:
        """A vector of the parameters' layout as tensors, one for each. Local."""
        known = self._vectors.get(id(vector))
        if known is None or known[0] is not vector:
            views, begin = [], 0
            for p in self.tensors.values():
                views.append(as_tensor(vector[begin : begin + p.numel()]).view(p.shape))
                begin += p.numel()
            if len(self._vectors) > 16:  # gradients, and an optimizer's vectors
                self._vectors.clear()
            known = self._vectors[id(vector)] = vector, views
        return known[1]

    def frozen_checksum(self) -> str:
        """Of all frozen parameters' values: that a checkpoint goes with the same ones. Local."""
        checksum = 0
        for p in self._frozen:
            checksum = checksum_of(p, checksum)
        return f"{checksum:08x}"

    def _full_name(self, owner: nn.Module, name: str) -> str:
        place = next(place for place, module in self.module.named_modules() if module is owner)
        return f"{place}.{name}".lstrip(".")


def put(gradient: torch.Tensor | None, view: torch.Tensor) -> None:
    """Write a parameter's gradient, dense or sparse, into a view. Local."""
    if gradient is None:
        view.zero_()
    elif gradient.is_sparse:
        view.zero_().add_(gradient.detach())
    else:
        view.copy_(gradient.detach())


class GradientProbe:
    """Some values of each gradient as backward has left it.

    Attributes:
        keeps: whether backward keeps them, which costs some microseconds a parameter.
        values: by the number of the parameter.
    """

    def __init__(self) -> None:
        self.keeps = False
        self.values: dict[int, torch.Tensor] = {}

    def keep(self, number: int, gradient: torch.Tensor) -> None:
        self.values[number] = _few_of(gradient).clone()


def _is_mean_of(added_up: torch.Tensor | None, now: torch.Tensor, backwards: int) -> bool:
    """Whether values are what backward has left, or that divided by the number of backwards."""
    if added_up is None:
        return False
    return torch.equal(now, added_up) or (
        backwards > 1 and torch.allclose(now * backwards, added_up)
    )


def _few_of(gradient: torch.Tensor) -> torch.Tensor:
    """Some of its values, at equal distances."""
    return gradient.detach().reshape(-1)[:: max(1, gradient.numel() // FEW)]


def _mover(
    number: int, view: torch.Tensor, backwards: list[int], versions: list[int], probe: GradientProbe
) -> Callable[[torch.Tensor], None]:
    """Moves a gradient that backward has made to its place, and counts. What later backwards
    compute, PyTorch adds to it there. One with a graph of its own (``create_graph=True``) stays as
    it is until `FlatModule.gather`: the program may go on with it."""

    def move(parameter: torch.Tensor) -> None:
        gradient: Any = parameter.grad
        if gradient is view:
            version = view._version
            added = version == versions[number] + 1  # else it was zeroed, say, before
            backwards[number] = backwards[number] + 1 if added else 1
            versions[number] = version
        elif not gradient.requires_grad:
            if gradient.is_sparse:
                put(gradient, view)
            else:
                view.copy_(gradient)
            parameter.grad = view
            backwards[number], versions[number] = 1, view._version
        if probe.keeps and parameter.grad is view:
            probe.keep(number, view)

    return move


def belongs_to_learner(parameter: torch.Tensor) -> bool:
    """Whether it is a view of an open learner's vector. Local."""
    known = _wrapped.get(id(parameter))
    return known is not None and known() is parameter


def device_of(model: Any) -> torch.device:
    """Of a model's first trainable parameter; the CPU where there is none. Local."""
    parameters = model.parameters() if isinstance(model, nn.Module) else ()
    return next((p.device for p in parameters if p.requires_grad), torch.device("cpu"))


def buffers_of(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers that ``state_dict`` has, by name, each without its gradient. Local."""
    for full_name, part, name in places_of_buffers(module):
        buffer = part._buffers[name]
        assert buffer is not None
        yield full_name, buffer.detach()


def places_of_buffers(module: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """The same buffers: the name of each, whose it is, and its name there. Local."""
    for place, part in module.named_modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                yield plain_name(f"{place}.{name}".lstrip(".")), part, name


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """All parameters, each once, and the buffers that ``state_dict`` has, by name. Local."""
    parameters = {plain_name(name): p.detach() for name, p in module.named_parameters()}
    return {**parameters, **dict(buffers_of(module))}


def layout_of(model: nn.Module) -> dict[str, Any]:
    """What the ranks must have in common of a model, beside its trainable parameters. Local."""
    frozen = {plain_name(n): p for n, p in model.named_parameters() if not p.requires_grad}
    return {
        f"frozen parameter {name!r} of the model": _layout(p) for name, p in frozen.items()
    } | layout_of_buffers(model)


def layout_of_buffers(model: nn.Module) -> dict[str, Any]:
    """What the ranks must have in common of a model's buffers, to make them the same. Local."""
    return {f"buffer {name!r} of the model": _layout(b) for name, b in buffers_of(model)}


def _layout(tensor: torch.Tensor) -> tuple[torch.dtype, list[int]]:
    return tensor.dtype, list(tensor.shape)


def plain_name(name: str) -> str:
    """What a parameter of a module is called, whether or not that was compiled. Local."""
    return name.replace("_orig_mod.", "")
