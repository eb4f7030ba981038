"""The state of DDP's hook by itself, with buckets that are made here: nothing is lost between them.

Its saved state is in `test_torch_hook_state.py`; what DDP itself does with the hook is in
`test_torch_ddp_processes.py`.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hook_buckets import (
    LAYOUTS,
    SIZES,
    TWO,
    WHOLE,
    Bucket,
    Model,
    left,
    residuals_of,
    same_state,
    summed,
)
from torch.nn import Linear, Sequential

from parallel_sgd import UserError
from parallel_sgd.errors import SharedError
from parallel_sgd.torch import hook, hook_state, init_process_group

pytestmark = [pytest.mark.threads(1, 3), pytest.mark.ranks(2)]


@pytest.mark.parametrize("transport", ["collective", "pipelined"])
@pytest.mark.parametrize("bits", [32, 4, 1, {0: 32, 2: 1, 4: 4}], ids=str)
def test_nothing_is_lost_as_buckets_change(comm, bits, transport):
    model = Model(comm.rank)
    with hook_state(comm, gradient_bits=bits, block_size=64, transport=transport) as state:
        given, got, sent = np.zeros(sum(SIZES)), np.zeros(sum(SIZES)), [0]
        for step, layout in enumerate(LAYOUTS):
            gradients = model.gradients(step)
            given += summed(comm, gradients)
            got += comm.size * np.concatenate(model.means(state, layout, gradients)).astype(float)
            sent.append(state.bytes_sent)
            lost = 0 if bits == 32 else left(comm, state)
            assert np.abs(got + lost - given).max() < 1e-4 * comm.size
        assert state.steps == len(LAYOUTS)
        if isinstance(bits, dict) and comm.size > 1:
            of_a_step = np.diff(sent)  # 32, 32, 1, 1, 4 and 4 bits
            assert of_a_step[2:].max() < of_a_step[:2].min() / 4
        totals = comm.allgather_object(got.tobytes())
        assert len({*totals}) == 1


def test_full_precision_is_the_mean(comm):
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.float64, 1e-14)):
        model = Model(comm.rank, dtype)
        with hook_state(comm) as state:
            means = np.concatenate(model.means(state, LAYOUTS[3], model.gradients(0)))
        expected = summed(comm, model.gradients(0)) / comm.size
        assert np.abs(means - expected).max() < tolerance


def test_the_report(comm):
    model, values = Model(comm.rank), sum(SIZES)
    with hook_state(comm, gradient_bits=4, block_size=256) as state:
        assert state.report()["ratio_to_32_bits"] is None
        for step in range(3):
            model.means(state, WHOLE, model.gradients(step))
        report = json.loads(json.dumps(state.report()))
        full = 2 * (comm.size - 1) * 4 * values * 3 // comm.size
        assert report["steps"] == 3
        assert report["bytes_sent"] == state.bytes_sent
        assert report["bytes_in_32_bit"] == full
        assert report["skipped"] == {"minibatches": 0, "latest": ""}
        if comm.size > 1:
            sent = np.mean(comm.allgather_object(report["bytes_per_value"]))
            assert 0.5 < sent / (2 * (comm.size - 1) / comm.size) < 0.6
            assert report["ratio_to_32_bits"] == full / state.bytes_sent > 6
        model.means(state, WHOLE, model.gradients(3))
        assert state.report()["bytes_per_value"] == report["bytes_per_value"]


def test_what_is_not_finite_is_told_on_all_ranks(comm):
    for bad in range(len(TWO)):
        model, rank = Model(comm.rank), comm.size - 1
        with hook_state(comm, gradient_bits=1) as state:
            model.means(state, TWO, model.gradients(0))
            gradients = model.gradients(1)
            if comm.rank == rank:
                gradients[TWO[bad][0]][0] = np.nan
            with pytest.raises(SharedError, match=rf"not finite.*\(on rank {rank}\)"):
                model.means(state, TWO, gradients)
            assert all(np.isfinite(one).all() for one in residuals_of(state).values())


def test_an_error_in_backward_is_noticed_by_the_next(comm):
    model = Model(comm.rank)
    with hook_state(comm, gradient_bits=1) as state:
        first, _ = model.buckets(TWO, model.gradients(0))
        state.begin(first)
        with pytest.raises(UserError, match="bucket 0 came when bucket 1 was due"):
            state.begin(first)
        with pytest.raises(
            UserError, match=r"state_dict\(\) must be called between backward passes"
        ):
            state.state_dict()
    with pytest.raises(UserError, match="is closed"):
        state.begin(first)
    state.close()


def scaler_of(scale):
    return torch.amp.GradScaler("cpu", init_scale=scale)


def test_an_overflow_on_one_rank_is_one_on_all(comm):
    model, scaler = Model(comm.rank), scaler_of(1024.0)
    scaler.scale(torch.zeros(1))  # sets its scale
    with hook_state(comm, gradient_bits=1, scaler=scaler) as state:
        means = [m / 1024 for m in model.means(state, WHOLE, scaled(model.gradients(0), 1024))]
        given, got = summed(comm, model.gradients(0)), np.concatenate(means).astype(float)
        before = state.state_dict()
        overflowing = scaled(model.gradients(1), 1024)
        if comm.rank == comm.size // 2:
            overflowing[3][0] = np.inf
        assert all(np.isinf(m).all() for m in model.means(state, WHOLE, overflowing))
        assert same_state(before["residuals"], state.state_dict()["residuals"])
        skipped = state.report()["skipped"]
        assert skipped == {"minibatches": 1, "latest": "gradients overflowed with a scale of 1024"}
        scaler.update(512.0)
        means = [m / 512 for m in model.means(state, TWO, scaled(model.gradients(2), 512))]
        given += summed(comm, model.gradients(2))
        got += np.concatenate(means)
        lost = left(comm, state) / 512
        assert np.abs(lost).max() > 0
        assert np.abs(comm.size * got + lost - given).max() < 1e-4 * comm.size


def scaled(gradients, scale):
    return [gradient * np.float32(scale) for gradient in gradients]


def test_scales_that_differ(comm):
    model, scaler = Model(comm.rank), scaler_of(float(2 + (comm.rank == 0)))
    scaler.scale(torch.zeros(1))
    with hook_state(comm, gradient_bits=1, scaler=scaler) as state:
        if comm.size == 1:
            model.means(state, WHOLE, model.gradients(0))
            return
        with pytest.raises(SharedError, match=r"the scaler's scale .* must be the same"):
            model.means(state, WHOLE, model.gradients(0))


def module(dtype=torch.float32):
    return Sequential(Linear(4, 3), Linear(3, 2).to(dtype))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"scaler": 3}, "scaler=3 must be a torch.amp.GradScaler"),
        ({"gradient_bits": 9.3}, "gradient_bits=9.3"),
        ({"bits_of": {"*.bias": 32}}, r"bits_of: '\*.bias' is of names: it needs module="),
        ({"bits_of": {"b*": 32}, "module": module()}, "'b.' matches no parameter"),
        (
            {"module": Sequential(Linear(4, 3), Linear(3, 2, device="meta"))},
            "'0.weight' is on cpu, but '1.weight' on meta: all must be on one device",
        ),
        ({"module": module(torch.bfloat16)}, "parameter '1.weight' is bfloat16"),
        ({"module": module(torch.float64), "gradient_bits": 1}, "'1.weight' is float64"),
    ],
    ids=str,
)
def test_what_is_refused_at_once(comm, options, error):
    with pytest.raises(UserError, match=error):
        hook_state(comm, **{"gradient_bits": 1, **options})


def test_devices_that_differ_between_ranks(comm):
    if comm.size > 1:
        device = "meta" if comm.rank == 1 else "cpu"
        with pytest.raises(SharedError, match=r"the device of the module's parameters.*meta"):
            hook_state(comm, module=Linear(2, 2, device=device))


class Compiled(torch.nn.Module):
    """Has a module within as torch.compile's has."""

    def __init__(self, layer):
        super().__init__()
        self._orig_mod = layer


def test_names_do_not_show_what_was_compiled(comm):
    layers = module()
    layers[0] = Compiled(layers[0])
    bits_of = {"0.bias": 32, "1.*": 32}
    with hook_state(comm, gradient_bits=1, bits_of=bits_of, module=layers) as state:
        values = torch.zeros(sum(p.numel() for p in layers.parameters()))
        state.begin(Bucket(0, True, [*layers.parameters()], values))
        assert {*residuals_of(state)} == {"0.weight", "0.bias", "1.weight", "1.bias"}


def test_a_process_group_with_another_order_of_ranks(on_ranks, monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)

    def body(comm):
        if comm.size > 1:
            with pytest.raises(SharedError, match="rank 1 of comm is rank 0 of DDP's process"):
                hook_state(comm)
            return
        hook_state(comm).close()

    size = on_ranks(lambda comm: comm.size)[0]
    monkeypatch.setattr(dist, "get_world_size", lambda group: size)
    on_ranks(body)


def test_what_is_refused_without_a_communicator_or_a_state():
    with pytest.raises(UserError, match="comm=None must be the ranks"):
        hook_state(gradient_bits=1)
    with pytest.raises(UserError, match=r"state=None must be what psgd\.torch\.hook_state"):
        hook(None, torch.zeros(1))


def test_what_is_refused_with_the_first_bucket(comm):
    for dtype, error in ((torch.float64, "parameter '0' is float64"), (torch.float16, "float16")):
        model = Model(comm.rank, dtype)
        with (
            hook_state(comm, gradient_bits=1) as state,
            pytest.raises(SharedError, match=error),
        ):
            model.means(state, TWO, model.gradients(0))
    model = Model(comm.rank)
    with (
        hook_state(comm, module=module()) as state,
        pytest.raises(SharedError, match="that is not a parameter of module="),
    ):
        model.means(state, WHOLE, model.gradients(0))


def test_other_callers_than_ddp(comm):
    """FSDP, and torch.compile with python_reducer."""
    with hook_state(comm) as state:
        for given in (torch.zeros(2),), (torch.zeros(2), torch.zeros(1)), ((1, 2),):
            with pytest.raises(UserError, match="is for the buckets of DistributedDataParallel"):
                hook(state, *given)


def test_a_process_group_without_an_interface(on_ranks, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere")

    def body(comm):
        with pytest.raises(SharedError, match="GLOO_SOCKET_IFNAME=nowhere has no IPv4 address"):
            init_process_group(comm)

    on_ranks(body)


def test_bits_by_name(comm):
    """A parameter with 32 bits of its own loses nothing."""
    layers = module()
    options = {"gradient_bits": 1, "code": "sign", "bits_of": {"0.*": 32}}
    with hook_state(comm, **options, module=layers) as state:
        parameters = [*layers.parameters()]
        rng = np.random.default_rng(comm.rank)
        own = [rng.standard_normal(p.numel()).astype(np.float32) for p in parameters]
        values = torch.from_numpy(np.concatenate(own))
        state.begin(Bucket(0, True, parameters, values))
        first = parameters[0].numel() + parameters[1].numel()
        expected = summed(comm, own) / comm.size
        assert np.abs(values.numpy() - expected)[:first].max() < 1e-6
        assert np.abs(values.numpy() - expected)[first:].max() > 1e-3
        assert {*residuals_of(state)} == {"0.weight", "0.bias", "1.weight", "1.bias"}
