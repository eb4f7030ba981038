"""Small PyTorch optimizers, which keep their state in the ways in which other people's do."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any

import numpy as np
import torch

Parameters = Any


class Small(torch.optim.Optimizer):
    """x -= lr * direction, with a state for each parameter."""

    def __init__(self, params: Parameters, lr: float = 0.1, **more: Any) -> None:
        super().__init__(params, {"lr": lr, **more})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            self.begin(group)
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(self.direction(p, self.state[p], group), alpha=group["lr"])

    def begin(self, group: dict[str, Any]) -> None:
        """Before the parameters of a group."""

    def direction(self, p: Any, state: dict[str, Any], group: dict[str, Any]) -> torch.Tensor:
        raise NotImplementedError


class Replacing(Small):
    """Makes its momentum anew in each step."""

    def direction(self, p, state, group):
        state["m"] = 0.9 * state.get("m", torch.zeros_like(p)) + p.grad
        return state["m"]


class Late(Small):
    """Has None in place of its momentum for some steps."""

    def direction(self, p, state, group):
        state["n"] = state.get("n", 0) + 1
        state.setdefault("m", None)
        if state["n"] < 3:
            return p.grad
        state["m"] = p.grad.clone() if state["m"] is None else state["m"].mul_(0.9).add_(p.grad)
        return state["m"]


class Swapping(Small):
    """Gives its two tensors each other's names."""

    def direction(self, p, state, group):
        if not state:
            state["now"], state["before"] = torch.zeros_like(p), torch.zeros_like(p)
        state["now"], state["before"] = state["before"], state["now"]
        state["now"].copy_(p.grad).add_(state["before"], alpha=0.5)
        return state["now"] + 0.1 * state["before"]


class Passing(Small):
    """What was the newest tensor is the one before: each is made once, and goes from name to
    name."""

    def direction(self, p, state, group):
        state["before"] = state.get("now", torch.zeros_like(p))
        state["now"] = p.grad + 0.5 * state["before"]
        return state["now"] - 0.3 * state["before"]


class KeepingGradients(Small):
    """Keeps gradients, and not copies of them."""

    def direction(self, p, state, group):
        before = state.get("gradient", torch.zeros_like(p))
        latest = state.setdefault("latest", deque(maxlen=3))
        latest.append(p.grad)
        state["gradient"], state["row"] = p.grad, p.grad.reshape(-1)[:1]
        return p.grad + 0.5 * before + 0.1 * latest[0]


class Shared(Small):
    """Has one tensor under two names."""

    def direction(self, p, state, group):
        if not state:
            state["m"] = state["same"] = torch.zeros_like(p)
        state["m"].mul_(0.9).add_(p.grad)
        return state["same"]


class OneMemory(Small):
    """Has all momenta in one tensor, of which the state has views."""

    def __init__(self, params: Parameters) -> None:
        super().__init__(params)
        held = self.param_groups[0]["params"]
        self.flat = torch.zeros(sum(p.numel() for p in held))
        self._take(self.flat)

    def _take(self, flat: torch.Tensor) -> None:
        held = self.param_groups[0]["params"]
        for p, part in zip(held, flat.split([p.numel() for p in held]), strict=True):
            self.state[p]["m"] = part.view(p.shape)

    def step(self, closure=None):
        self.flat.mul_(0.9)
        super().step()

    def direction(self, p, state, group):
        return state["m"].add_(p.grad)

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        held = self.param_groups[0]["params"]
        self.flat.copy_(torch.cat([self.state[p]["m"].reshape(-1) for p in held]))
        self._take(self.flat)


class GroupKeys(Small):
    """Puts numbers into the group in its first step, and a tensor."""

    def begin(self, group):
        group["k"] = group.get("k", 0) + 1
        group["d"] = group.get("d", 1e-3) * 1.01
        group.setdefault("seen", torch.zeros(2, dtype=torch.int64)).add_(1)

    def direction(self, p, state, group):
        return p.grad / group["k"] + group["d"] * int(group["seen"][0])


class PlainValues(Small):
    """Has values of many types beside a tensor, and goes on by them."""

    def direction(self, p, state, group):
        if not state:
            state |= {"warm": False, "none": None, "rate": np.float64(1.0), "text": "é$", "n": 0}
            state |= {"big": 2**70, "pair": (0.5, [1, "x"]), "nan": float("nan"), 3: b"\x00"}
            state |= {"array": np.zeros(2, np.float32), "complex": 1j, ("a", 0): {1: 2.5}}
        state["n"] += 1
        state["rate"] = np.float64(np.sqrt(state["rate"] + 1))
        state["array"] = state["array"] + np.float32(0.1)
        state["warm"] = not state["warm"]
        ok = state["text"] == "é$" and state["none"] is None and state["big"] == 2**70
        ok = ok and state["pair"] == (0.5, [1, "x"]) and state["nan"] != state["nan"]
        ok = ok and state[3] == b"\x00" and state["complex"] == 1j and state["a", 0] == {1: 2.5}
        assert ok and type(state["rate"]) is np.float64 and state["array"].dtype == np.float32
        factor = float(state["rate"]) + float(state["array"][1]) + state["n"] + state["warm"]
        return p.grad * factor / 10


class OwnCounter(Small):
    """Counts in an attribute, which its ``state_dict`` has, too."""

    t = 0

    def begin(self, group):
        self.t += 1
        group["lr"] = 0.1 / self.t

    def direction(self, p, state, group):
        return p.grad

    def state_dict(self):
        return super().state_dict() | {"t": self.t}

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.t = state_dict["t"]


class Matrices(Small):
    """Has lists of matrices, of eigenvectors, too, whose axes lie the other way round in memory."""

    def direction(self, p, state, group):
        whole = p.grad.clone()  # products round by where a tensor lies in memory
        matrix = whole.reshape(len(p), -1) if p.dim() else whole.reshape(1, 1)
        if not state:
            state["sums"] = [torch.zeros(n, n) for n in matrix.shape]
            state["axes"] = None
        state["sums"][0] += matrix @ matrix.T
        state["sums"][1].lerp_(matrix.T @ matrix, 0.5)
        if state["axes"] is None:
            state["axes"] = [torch.linalg.eigh(m + torch.eye(len(m)))[1] for m in state["sums"]]
        left, right = state["axes"]
        return (left @ (left.T @ matrix @ right) @ right.T).reshape(p.shape)


class Narrow(Small):
    """Has states of other dtypes than its parameters', and brings them back to these."""

    def direction(self, p, state, group):
        if not state:
            state["m"] = torch.zeros_like(p, dtype=torch.bfloat16)
            state["n"] = torch.zeros(1, dtype=torch.int32)
            state["mask"] = torch.ones_like(p, dtype=torch.bool)
        m = state["m"].float() * 0.9 + p.grad
        state["m"], state["n"] = m.bfloat16(), (state["n"] + 1).int()
        state["mask"] = m > -0.01 * int(state["n"])
        return m * state["mask"]


class OfSome(Small):
    """Has a momentum of matrices only."""

    def direction(self, p, state, group):
        if p.dim() < 2:
            return p.grad
        return state.setdefault("m", torch.zeros_like(p)).mul_(0.9).add_(p.grad)


class ByParameter(Small):
    """Keeps more in a dictionary of its own, with a default, by parameter."""

    def __init__(self, params: Parameters) -> None:
        super().__init__(params)
        self.more: Any = defaultdict(int)

    def direction(self, p, state, group):
        self.more[p] += 1
        return p.grad / self.more[p]

    def state_dict(self):
        return super().state_dict() | {"more": self.more}

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.more = state_dict["more"]


class Around(torch.optim.Optimizer):
    """Around another optimizer, whose groups it has, as Lookahead is; it makes no hooks."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base, self.defaults = base, {}
        self.state: Any = defaultdict(dict)
        for group in self.param_groups:
            group["count"] = 0
            for p in group["params"]:
                self.state[p]["slow"] = p.detach().clone()

    @property
    def param_groups(self):
        return self.base.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.base.step()
        for group in self.param_groups:
            group["count"] += 1
            for p in group["params"]:
                slow = self.state[p]["slow"]
                if group["count"] % 3 == 0:
                    p.copy_(slow.lerp_(p, 0.5))

    def state_dict(self) -> Any:
        held = [p for group in self.param_groups for p in group["params"]]
        slow = {(0, i): dict(self.state[p]) for i, p in enumerate(held)}
        return {"slow": slow, "base": self.base.state_dict()}

    def load_state_dict(self, state_dict: Any) -> None:
        self.base.load_state_dict(state_dict["base"])
        held = [p for group in self.param_groups for p in group["params"]]
        for i, p in enumerate(held):
            self.state[p] = {k: v.clone() for k, v in state_dict["slow"][0, i].items()}


class Delegating(torch.optim.Optimizer):
    """Around another optimizer, whose list of groups and ``state_dict`` it has."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__([torch.nn.Parameter(torch.zeros(1))], {})
        self.base, self.param_groups, self.state = base, base.param_groups, {}
        self.state_dict, self.load_state_dict = base.state_dict, base.load_state_dict

    def step(self, closure: Any = None) -> None:
        self.base.step()


class Unholdable(Small):
    """Has an object of its own in its state."""

    class Preconditioner:
        pass

    def direction(self, p, state, group):
        state.setdefault("preconditioner", self.Preconditioner())
        return p.grad
