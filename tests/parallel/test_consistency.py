"""Programs in which a rank does not what the others do: an error on all, where it was silent."""

from __future__ import annotations

import re
import warnings

import numpy as np
import pytest
from cases import zeros
from few_weights import ALGORITHMS, by_algorithm, errors_of, last, learner_of, named, numbered

import parallel_sgd as psgd
from parallel_sgd.data import Source
from parallel_sgd.errors import SharedError, UserError
from parallel_sgd.training.consistency import EVERY, SAME_GRADIENTS, checksum

pytestmark = pytest.mark.messages


@pytest.mark.parametrize("call", ["step", "meet", "finish"])
@by_algorithm
def test_two_learners_called_in_crossed_order(on_ranks, name, call):
    def body(comm):
        pair = [learner_of(comm, ALGORITHMS[name]) for _ in range(2)]
        if last(comm) and comm.size > 1:
            pair.reverse()
        for learner in pair * 2:
            learner.gradient.flat[:] = 1
            if call == "step":
                learner.step(2)
            else:
                getattr(learner, call)()

    message, size = errors_of(on_ranks, body)
    if size > 1:
        assert message.startswith("call of the ranks must be the same on all ranks, but differs: ")
        assert re.search(rf"rank {size - 1}: '{call}( \(.*\))? of learner \d+'$", message)


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("name", ["data-parallel", "blocks", "overlap"])
def test_gradients_that_are_the_same_on_all_ranks(on_ranks, name, same):
    """Several times in a row, to the bit: the ranks have not dealt out their samples."""

    def body(comm):
        learner = learner_of(comm, ALGORITHMS[name])
        for step in range(10):
            random = np.random.default_rng([step, comm.rank * (not same)])
            learner.gradient.flat[:] = random.standard_normal(2)
            assert learner.step(2) == 2 * comm.size
        return comm.size

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sizes = on_ranks(body)
    assert len(sizes) == sizes[0]
    texts = [str(warning.message) for warning in caught]
    assert on_ranks(lambda comm: texts)[0] == [SAME_GRADIENTS] * (same and sizes[0] > 1)
    assert all(warning.filename == __file__ for warning in caught)


@pytest.mark.parametrize("value", [np.nan, np.inf, 0, -0.0])
def test_gradients_of_values_that_say_nothing_of_samples(on_ranks, value):
    """Those of samples that are left out, say."""

    def body(comm):
        learner = learner_of(comm, psgd.DataParallelSGD(), not_finite="skip")
        for _ in range(8):
            learner.gradient.flat[:] = value
            learner.step(2)
        return comm.size

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sizes = on_ranks(body)
    assert len(sizes) == sizes[0]
    texts = [str(warning.message) for warning in caught]
    assert SAME_GRADIENTS not in texts


class Augmented:
    """Items whose x is another one at every reading."""

    def __init__(self, rank, labels):
        self.random, self.labels = np.random.default_rng(rank), labels

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.random.standard_normal(2), self.labels[index]


@pytest.mark.parametrize("what", ["x", "y", "labels of items"])
def test_ranks_that_read_different_data_of_one_shape(on_ranks, what):
    def body(comm):
        learner = learner_of(comm)
        x, y = numbered(400)
        other = last(comm) and comm.size > 1
        if what == "x":
            x[1::2] += other
        else:
            y = y[::-1] if other else y
        data = (Augmented(comm.rank, y), None) if what == "labels of items" else (x, y)
        Source(*data, 4 * comm.size).meet(learner)

    message, size = errors_of(on_ranks, body)
    if size > 1:
        assert message.startswith("data must be the same on all ranks, but differs: rank")


def test_items_that_are_augmented_at_random_are_the_same_data(comm):
    learner = learner_of(comm)
    source = Source(Augmented(comm.rank, np.arange(20)), minibatch_size=4)
    assert len(list(source.minibatches(learner))) == 5


class Windows:
    """Items whose x and y are others at every reading: some, or all."""

    def __init__(self, rank, often):
        self.random, self.often = np.random.default_rng(rank), often

    def __len__(self):
        return 40

    def __getitem__(self, index):
        at = self.random.integers(4, 100) if self.random.random() < self.often else index
        return np.arange(at, at + 4), at % 4


@pytest.mark.parametrize("often", [0.5, 1.0])
def test_labels_that_are_drawn_anew_are_no_other_data(comm, often):
    for number in range(5):
        learner = learner_of(comm)
        source = Source(Windows(100 * number + comm.rank, often), minibatch_size=4 * comm.size)
        for x, _ in source.minibatches(learner):
            learner.step(len(x))
        learner.finish()


def rows_of_session(comm, train, labels, **options):
    model = psgd.models.SoftmaxRegression(4, 4)
    algorithm, optimizer = psgd.DataParallelSGD(), psgd.SGD(lr=0.001)
    test = psgd.data.Arrays(np.eye(4, dtype=np.float32), labels)
    with psgd.Learner(model.parameters, optimizer, algorithm, comm) as learner:
        return psgd.TrainingSession(
            learner=learner,
            objective=model,
            train=train,
            validation=psgd.CrossValidation(data=test, name="test"),
            minibatch_size=4 * comm.size,
            **options,
        ).run()


def test_a_session_over_windows_is_resumed(comm, tmp_path):
    folder = comm.allgather_object(tmp_path)[0]
    for epochs in (1, 2):
        windows = psgd.data.as_dataset(Windows(comm.rank + epochs, 1.0))
        kept = psgd.CheckpointConfig(folder=folder, every=20, resume=True)
        rows = rows_of_session(comm, windows, np.arange(4), epochs=epochs, checkpoints=kept)
        assert len(rows) == epochs


def test_sessions_compare_test_data(on_ranks):
    def body(comm):
        y = np.arange(4)
        train = psgd.data.Arrays(np.eye(4, dtype=np.float32), y)
        rows_of_session(comm, train, y[::-1] if last(comm) and comm.size > 1 else y, epochs=1)

    message, size = errors_of(on_ranks, body)
    if size > 1:
        assert message.startswith("test data must be the same on all ranks, but differs: rank")


@pytest.mark.parametrize("where", ["step", "meet", "finish", "save"])
@by_algorithm
def test_models_that_have_drifted_apart(on_ranks, tmp_path, name, where):
    """What all have in common: in blocks, where they began."""
    algorithm = ALGORITHMS[name]

    def body(comm):
        learner = learner_of(comm, algorithm)

        def step():
            learner.gradient.flat[:] = 1 + comm.rank
            learner.step(2)

        for _ in range(4):
            step()
        model = learner.runner.common_model()
        if last(comm) and comm.size > 1:
            model[0] += 1
        if where == "step":
            for _ in range(EVERY + 2):
                step()
        elif where == "save":
            psgd.Checkpoints(comm.allgather_object(tmp_path)[0]).save(learner)
        else:
            getattr(learner, where)()

    message, size = errors_of(on_ranks, body)
    if size > 1:
        others = named(range(size - 1))
        assert re.match(
            rf"the model's checksum must be the same on all ranks, but differs: {others}: '\w+'; "
            rf"rank {size - 1}: '\w+'; rank {size - 1} differs from the other ranks",
            message,
        ) or (size == 2 and "the wrong ranks are unknown" in message)


@pytest.mark.parametrize("how", ["drift", "fail"])
@by_algorithm
def test_going_back_to_a_checkpoint_after_an_error(comm, tmp_path, name, how):
    """Ranks that differ need not be alike for that, and are afterwards."""
    learner = learner_of(comm, ALGORITHMS[name])

    def train(steps):
        for _ in range(steps):
            learner.gradient.flat[:] = 1 + comm.rank
            learner.announce(2, 2 * comm.size)
            learner.step(2)

    def go_wrong():
        train(1)
        if how == "fail" and comm.rank == 0:
            learner.fail("bad")
        learner.runner.common_model()[1] += comm.rank
        train(EVERY + 2)

    train(4)
    folder = comm.allgather_object(tmp_path)[0]
    with psgd.Checkpoints(folder) as checkpoints:
        checkpoints.save(learner)
    alike = learner.parameters.flat.copy()
    if how == "fail" or comm.size > 1:
        with pytest.raises(SharedError):
            go_wrong()
    psgd.load_checkpoint(learner, folder)
    assert np.array_equal(learner.parameters.flat, alike)
    train(2 * EVERY + 1)
    learner.finish()


def test_loading_on_one_rank_alone(on_ranks, tmp_path):
    def body(comm):
        learner = learner_of(comm)
        if last(comm):
            psgd.load_checkpoint(learner, tmp_path)
        else:
            learner.step(2)

    message, size = errors_of(on_ranks, body)  # of one rank, that there is no checkpoint
    if size > 1:
        assert re.search(r"call of the ranks .*'load_checkpoint of learner \d+'$", message)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("size", [0, 1, 2, 7, 8])
def test_a_checksum_sees_every_bit(dtype, size):
    x = np.linspace(-1, 1, size).astype(dtype)
    before = checksum(x)
    for bit in range(8 * x.nbytes):
        x.view(np.uint8)[bit // 8] ^= 1 << bit % 8
        assert checksum(x) != before
        x.view(np.uint8)[bit // 8] ^= 1 << bit % 8
    assert checksum(x) == before


def test_an_optimizers_state_is_reset_to_what_it_was_at_first(comm):
    optimizer = psgd.Adagrad(lr=0.1, initial_accumulator=0.5)
    parameters = zeros("one block")
    algorithm = psgd.BlockMomentumSGD(sync_steps=3)
    learner = psgd.Learner(parameters, optimizer, algorithm, comm)
    (s,) = learner.local_step.state.buffers.values()
    for step in range(6):
        learner.gradient.flat[:] = 1 + comm.rank
        learner.step(2)
        assert (s == 0.5).all() == (step % 3 == 2)
    assert learner.local_step.state.samples == 12 * comm.size


def test_bytes_are_counted_once_when_bits_change_and_inner_states_are_averaged(comm):
    def sent(bits):
        algorithm = psgd.ModelAveragingSGD(
            sync_steps=1, gradient_bits=bits, inner_state="average", block_size=64
        )
        learner = psgd.Learner(zeros("one block"), psgd.MomentumSGD(lr=0.1), algorithm, comm)
        for _ in range(3):
            learner.gradient.flat[:] = 1
            learner.step(1)
        learner.finish()
        return learner.bytes_sent

    later = 2 * comm.size  # the clock in the third block's end
    assert 3 * sent({0: 32, later + 1: 16}) == 2 * sent({0: 32, 10**9: 16}) + sent(16)


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"parameters": {"w": np.zeros(3)}}, "parameters must be an instance of Parameters, such"),
        (
            {"optimizer": psgd.SGD},
            "optimizer must be an instance of UpdateRule.* the class SGD( |$)",
        ),
        (
            {"algorithm": psgd.SGD(lr=1)},
            r"algorithm must be an instance of Algorithm, .* it is a .*\.SGD",
        ),
        ({"algorithm": psgd.DataParallelSGD}, "algorithm must .* the class DataParallelSGD( |$)"),
        ({"sync_perf_stats": "often"}, "sync_perf_stats='often' must be a whole number"),
    ],
)
def test_arguments_of_another_kind_are_refused_on_all_ranks(on_ranks, wrong, message, alone):
    def body(comm):
        given = {
            "parameters": zeros("one block"),
            "optimizer": psgd.SGD(lr=0.1),
            "algorithm": psgd.DataParallelSGD(),
        }
        psgd.Learner(**{**given, **(wrong if not alone or comm.rank == 0 else {})}, comm=comm)

    told, size = errors_of(on_ranks, body)
    assert re.match(message, told)
    assert told.endswith("(on rank 0)") == (alone or size == 1)


def test_a_communicator_of_mpi4py_is_none():
    with pytest.raises(
        UserError, match=r"comm must be an instance of Communicator, such as .* it is an object"
    ):
        psgd.Learner(zeros("one block"), psgd.SGD(lr=1), psgd.DataParallelSGD(), object())


def test_blocks_in_which_a_rank_can_have_no_sample_are_refused(on_ranks):
    def body(comm):
        algorithm = psgd.BlockMomentumSGD(block_samples=max(comm.size - 1, 1))
        learner_of(comm, algorithm)

    message, size = errors_of(on_ranks, body)
    if size > 1:
        assert message.startswith(
            f"block_samples={size - 1} must be at least the number of ranks, {size}: "
        )
