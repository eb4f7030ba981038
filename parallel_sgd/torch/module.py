"""A module whose trainable parameters and their gradients are views of flat vectors."""

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
from .sharded_model import ShardedModel

Array = Any  #: a NumPy or CuPy array

MAKE_ANEW = "make the learner after the model is complete, or close this learner and make a new one"

PROBED_VALUES = 16  #: values per gradient that are compared to detect changes

_wrapped: dict[int, ref[Any]] = {}
"""Parameters that are views of an open learner's vector, by id."""


class FlatModule:
    """Make a module's parameters views of one vector, and their gradients views of another.

    The parameters stay the same objects, so optimizers, tied weights and hooks keep working. Frozen
    parameters (``requires_grad=False``) are not touched. Backward allocates a tensor for each
    gradient. As soon as a gradient is complete, it is moved to its place in the vector, while still
    in the processor's caches, and its memory is free for the next gradient.

    Args:
        module: any `nn.Module` with trainable parameters, all of one dtype, float32 or float64, on
            one device.
    Raises:
        UserError: the module is not as required, or its buffers or parameters are not plain dense
            tensors.

    Attributes:
        parameters: the trainable parameters by name, each once, in the order of
            ``named_parameters()``.
        tensors: the same parameters as PyTorch tensors.
        names: of all parameters, also of frozen ones.
        device: of all trainable parameters.
        gradient: of the same layout; backward leaves gradients here: see `attach_gradient`.
        backwards: for each parameter, the number of backwards added to its gradient since the
            gradient was gathered or zeroed. (A backward with ``create_graph=True`` is not counted.)
        versions: for each parameter, PyTorch's version counter of its part of `gradient` after the
            latest backward.
        probe: a few values of each gradient after the latest backward: see `changed`.

    Local. Memory: the vector replaces the parameters' own memory.
    """

    def __init__(self, module: nn.Module) -> None:
        require_plain(module)
        self.module = module
        self.names = {p: plain_name(name) for name, p in module.named_parameters()}
        self.tensors = {name: p for p, name in self.names.items() if p.requires_grad}
        require_equal(self.tensors)
        require_dense(buffers_of(module))
        self.device = next(iter(self.tensors.values())).device
        for name, tensor in self.tensors.items():
            if belongs_to_learner(tensor):
                raise UserError(
                    f"parameter {name!r} belongs to another learner already: close that learner "
                    "first"
                )
        self.parameters = Parameters({name: as_array(p) for name, p in self.tensors.items()})
        self.gradient: Parameters = None  # type: ignore[assignment]  # until `attach_gradient`
        self.backwards = [0] * len(self.tensors)
        self.versions = list(self.backwards)
        self.probe = GradientProbe()
        self._hooks: list[Any] = []
        for name, tensor in self.tensors.items():
            tensor.data = as_tensor(self.parameters[name])
        self._claim()
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

    def _claim(self) -> None:
        for tensor in self.tensors.values():
            _wrapped[id(tensor)] = ref(tensor)

    def release(self) -> None:
        """Make the module available to another learner. Its parameters stay views of the vector.
        Local.
        """
        self._remove_hooks()
        for tensor in self.tensors.values():
            _wrapped.pop(id(tensor), None)

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def attach_gradient(self, gradient: Parameters) -> None:
        """Install hooks so that backward leaves gradients in a vector. Local.

        Args:
            gradient: of the parameters' layout.
        """
        self.gradient = gradient
        self._claim()
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
        """Check that the module still has exactly the parameters of its creation, in their places.

        Raises:
            UserError: a parameter was added, replaced, resized, moved, frozen or made trainable.

        Local. Cost: under a microsecond per parameter.
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
        """Complete `gradient`: multiply all gradients from backward by a factor.

        Parameters without a gradient get zeros. Afterwards no parameter has a ``grad``.

        Args:
            factor: multiplies the gradients.
            done: names of parameters whose gradients are already complete.
        Returns:
            For each parameter, whether backward has left a gradient.

        Local. Cost: one pass over the gradient, unless the factor is 1.
        """
        used, scaled = [], []
        flat = self.gradient.flat
        for (name, p), view in zip(self.tensors.items(), self.views_of(flat), strict=True):
            gradient = p.grad
            used.append(gradient is not None)
            if not (done and name in done):
                if gradient is not view:  # None, or a tensor from the program
                    put(gradient, view)
                if done:
                    scaled.append(view)
            p.grad = None
        if factor != 1:  # in a single call if all parameters need scaling
            for part in scaled if done else (as_tensor(flat),):
                part.mul_(factor)
        self.backwards[:] = [0] * len(used)
        self.probe.values.clear()
        return used

    def changed(self, own_hooks: int, *, sent: bool) -> str | None:
        """Return the name of a parameter whose gradient the program has changed since backward.

        Changes are found by PyTorch's version counter and by comparison with `probe`. Zeroing a
        gradient is no change, nor is division by the number of accumulated backwards.

        Args:
            own_hooks: the learner's number of hooks on each parameter. A parameter with further
                hooks is ignored, since these may have changed its gradient.
            sent: whether gradients have already been sent. Then values cannot be compared, and any
                change comes too late.
        Returns:
            The parameter's name; None if no change is found.

        Local. Cost: about 0.1 microseconds per parameter, and about 20 for each parameter with a
        new version counter.
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
        """Return whether backward has left any gradient. Local."""
        return any(p.grad is not None for p in self.tensors.values())

    def clear_gradients(self) -> None:
        """Set all gradients to None. Local."""
        for p in self.tensors.values():
            p.grad = None

    def norm(self, vector: torch.Tensor) -> float:
        """Return the norm of a vector of the parameters' layout. Local; for a `ShardedModel` the
        norm over all its shards, collective over the ranks of the host.
        """
        if isinstance(self.module, ShardedModel):
            return self.module.sharding.norm(vector)
        return float(torch.linalg.vector_norm(vector))

    def views_of(self, vector: Array) -> list[torch.Tensor]:
        """Return a vector of the parameters' layout as tensors, one per parameter. Local."""
        known = self._vectors.get(id(vector))
        if known is None or known[0] is not vector:
            views, begin = [], 0
            for p in self.tensors.values():
                views.append(as_tensor(vector[begin : begin + p.numel()]).view(p.shape))
                begin += p.numel()
            if len(self._vectors) > 16:  # enough for gradients and an optimizer's vectors
                self._vectors.clear()
            known = self._vectors[id(vector)] = vector, views
        return known[1]

    def frozen_checksum(self) -> str:
        """Return a checksum of all frozen parameters: a checkpoint requires equal values. Local."""
        checksum = 0
        for p in self._frozen:
            checksum = checksum_of(p, checksum)
        return f"{checksum:08x}"

    def _full_name(self, owner: nn.Module, name: str) -> str:
        place = next(place for place, module in self.module.named_modules() if module is owner)
        return f"{place}.{name}".lstrip(".")


def put(gradient: torch.Tensor | None, view: torch.Tensor) -> None:
    """Write a dense or sparse gradient into a view; zeros if the gradient is None. Local."""
    if gradient is None:
        view.zero_()
    elif gradient.is_sparse:
        view.zero_().add_(gradient.detach())
    else:
        view.copy_(gradient.detach())


class GradientProbe:
    """A few values of each gradient, as backward has left them.

    Attributes:
        keeps: whether backward saves values; costs some microseconds per parameter.
        values: the saved values, by the parameter's number.
    """

    def __init__(self) -> None:
        self.keeps = False
        self.values: dict[int, torch.Tensor] = {}

    def keep(self, number: int, gradient: torch.Tensor) -> None:
        self.values[number] = _few_of(gradient).clone()


def _is_mean_of(added_up: torch.Tensor | None, now: torch.Tensor, backwards: int) -> bool:
    """Return whether `now` equals `added_up`, or `added_up` divided by the number of backwards."""
    if added_up is None:
        return False
    return torch.equal(now, added_up) or (
        backwards > 1 and torch.allclose(now * backwards, added_up)
    )


def _few_of(gradient: torch.Tensor) -> torch.Tensor:
    """Return about `PROBED_VALUES` values of a gradient, equally spaced."""
    return gradient.detach().reshape(-1)[:: max(1, gradient.numel() // PROBED_VALUES)]


def _mover(
    number: int, view: torch.Tensor, backwards: list[int], versions: list[int], probe: GradientProbe
) -> Callable[[torch.Tensor], None]:
    """Return a hook that moves a parameter's gradient into its view and counts backwards.

    Later backwards add to the view. A gradient with a graph of its own (``create_graph=True``)
    stays in place until `FlatModule.gather`, since the program may still use the gradient.
    """

    def move(parameter: torch.Tensor) -> None:
        gradient: Any = parameter.grad
        if gradient is view:
            version = view._version
            added = version == versions[number] + 1  # else the program has changed the view
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
    """Return whether a parameter is a view of an open learner's vector. Local."""
    known = _wrapped.get(id(parameter))
    return known is not None and known() is parameter


def device_of(model: Any) -> torch.device:
    """Return the device of a model's first trainable parameter; the CPU if there is none. Local."""
    parameters = model.parameters() if isinstance(model, nn.Module) else ()
    return next((p.device for p in parameters if p.requires_grad), torch.device("cpu"))


def buffers_of(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and the detached tensor of each persistent buffer. Local."""
    for full_name, part, name in places_of_buffers(module):
        buffer = part._buffers[name]
        assert buffer is not None
        yield full_name, buffer.detach()


def places_of_buffers(module: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield each persistent buffer's full name, its submodule, and its name there. Local."""
    for place, part in module.named_modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                yield plain_name(f"{place}.{name}".lstrip(".")), part, name


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return all parameters, each once, and the persistent buffers, by name. Local."""
    parameters = {plain_name(name): p.detach() for name, p in module.named_parameters()}
    return {**parameters, **dict(buffers_of(module))}


def layout_of(model: nn.Module) -> dict[str, Any]:
    """Return dtypes and shapes that must agree on all ranks: frozen parameters and buffers.
    Local.
    """
    frozen = {plain_name(n): p for n, p in model.named_parameters() if not p.requires_grad}
    return {
        f"frozen parameter {name!r} of the model": _layout(p) for name, p in frozen.items()
    } | layout_of_buffers(model)


def layout_of_buffers(model: nn.Module) -> dict[str, Any]:
    """Return the buffers' dtypes and shapes, which must agree before synchronization. Local."""
    return {f"buffer {name!r} of the model": _layout(b) for name, b in buffers_of(model)}


def _layout(tensor: torch.Tensor) -> tuple[torch.dtype, list[int]]:
    return tensor.dtype, list(tensor.shape)


def plain_name(name: str) -> str:
    """Return a parameter's name without the prefix of `torch.compile`. Local."""
    return name.replace("_orig_mod.", "")
