"""Features of mean 0 and standard deviation 1: the numbers, who uses them, and who goes on."""

from __future__ import annotations

import re

import numpy as np
import pytest

import parallel_sgd as psgd
from parallel_sgd import UserError, data
from parallel_sgd.command_line import read, train_on
from parallel_sgd.data import standardization
from parallel_sgd.training import read_model


def features(samples=300):
    """Features of other sizes: one with a mean far from 0, a constant one, and small ones."""
    random = np.random.default_rng(0).standard_normal((samples, 4))
    return random * [1, 1e5, 0, 1e-3] + [3, 1.7e9, 0.1, 0]


def numbered(x):
    return data.Arrays(x, np.arange(len(x)) % 2)


def test_features_get_mean_0_and_deviation_1_in_train_and_the_same_numbers_in_test():
    x = features()
    by = data.Standardization.of(numbered(x[:200]))
    train, _ = by.given(numbered(x[:200])).arrays()
    assert train.dtype == np.float32 and abs(train.mean(0)).max() < 1e-6
    assert np.allclose(train.std(0), [1, 1, 0, 1], atol=1e-5)  # a constant one is not divided by 0
    test, y = by.given(numbered(x[200:])).read(np.array([7, 3]), classes=2)
    expected = (x[[207, 203]] - x[:200].mean(0)) / np.where([1, 1, 0, 1], x[:200].std(0), 1)
    assert np.allclose(test, expected, atol=1e-5) and y.tolist() == [1, 1]
    assert by.apply(x, None).dtype == np.float64
    whole = by.given(numbered(x)).split(0.5)[0]
    assert len(whole) == 150 and not whole.groups(np.arange(3))


def test_all_ranks_of_any_number_have_the_same_bits(monkeypatch):
    monkeypatch.setattr(standardization, "MOST_BYTES", 2000)  # of several parts and readings
    train = numbered(features())
    alone = data.Standardization.of(train)
    seen = []

    class Watched(data.Flattened):
        def read(self, indexes, **options):
            seen.append(len(indexes))
            return super().read(indexes, **options)

    def of_rank(comm):
        assert comm.size == 3
        by = data.Standardization.of(Watched(train), comm)
        return by.mean.tobytes(), by.scale.tobytes()

    assert set(psgd.simulate(3, of_rank)) == {(alone.mean.tobytes(), alone.scale.tobytes())}
    assert sum(seen) < 2 * len(train)  # not all by each of them
    assert np.allclose(alone.scale, np.where([1, 1, 0, 1], features().std(0), 1))


def test_what_cannot_be_standardized_is_refused(tmp_path):
    by = data.Standardization.of(numbered(features()))
    with pytest.raises(
        UserError, match=r"x has samples \[3\]: must be \[4\], as in the data of the st"
    ):
        by.given(numbered(np.ones((5, 3))))
    with pytest.raises(UserError, match="has no samples to compute a standardization of"):
        data.Standardization.of(numbered(np.ones((0, 2))))
    with pytest.raises(UserError, match="has ids for x, int64: ids cannot be standardized"):
        data.Standardization.of(data.ByteSequences(b"some text", 2))
    with pytest.raises(UserError, match="has features too large to be standardized"):
        data.Standardization.of(numbered(np.array([[1e300], [-1e300]])))
    with pytest.raises(UserError, match=r"standardized x\[1\]\[3\] = .* is too large for float32"):
        by.given(numbered(np.array([[0] * 4, [0, 0, 0, 1e38]]))).read(np.array([1]))
    assert data.read_standardization(tmp_path) is None
    by.write(tmp_path / standardization.STANDARDIZATION)
    again = data.read_standardization(tmp_path / "model.npz")
    assert again and again.mean.tobytes() == by.mean.tobytes()
    assert again.scale.tobytes() == by.scale.tobytes()
    data.Standardization(by.mean, 0 * by.scale).write(tmp_path / standardization.STANDARDIZATION)
    with pytest.raises(UserError, match=r"standardization.npz must hold .* and the scale above 0"):
        data.read_standardization(tmp_path)


def trained(folder, *given):
    """train.py on one rank; the parameters."""
    options, algorithm, optimizer = read(
        ["--data", str(folder / "d.npz"), "--no-plot", "--epochs", "1", *given]
    )
    train_on(options, algorithm, optimizer, psgd.Communicator.single())
    return read_model(options.output)


def numbers_in(folder):
    return (folder / "standardization.npz").read_bytes()


def test_runs_that_go_on_use_the_numbers_of_the_first(tmp_path):
    x = features()
    np.savez(tmp_path / "d.npz", x=x, y=(x[:, 0] > 3).astype(int))
    first, second, third = (str(tmp_path / name) for name in "abc")
    saves = ["--checkpoint-every", "100"]
    trained(tmp_path, "--standardize", "--output", first, *saves)
    numbers = numbers_in(tmp_path / "a")
    np.savez(tmp_path / "d.npz", x=x + 5, y=(x[:, 0] > 3).astype(int))
    shifted = data.Standardization.of(numbered(x + 5))
    trained(tmp_path, "--initial-model", first, "--output", second)
    assert numbers_in(tmp_path / "b") == numbers
    np.savez(tmp_path / "d.npz", x=x, y=(x[:, 0] > 3).astype(int))
    trained(tmp_path, "--resume", first, "--output", third, "--epochs", "2", *saves)
    assert numbers_in(tmp_path / "c") == numbers
    by = data.read_standardization(first)
    assert by is not None and abs(by.mean - shifted.mean)[0] > 4
    trained(tmp_path, "--output", str(tmp_path / "raw"))
    assert data.read_standardization(tmp_path / "raw") is None
    for option in ("--initial-model", "--resume"):
        name = option[2:].replace("-", "_")
        line = f"standardize=True: the model of {name}='.*raw' was trained on features as they are"
        with pytest.raises(UserError, match=line):
            trained(tmp_path, option, str(tmp_path / "raw"), "--standardize", "--output", third)


def test_a_run_that_diverges_at_its_start_names_the_option(tmp_path):
    x = features()
    np.savez(tmp_path / "d.npz", x=x * 1e3, y=x[:, 0])
    regression = ["--output", str(tmp_path / "a"), "--model", "linear"]
    line = re.escape("a smaller learning rate may help, or --standardize, if features are large")
    with pytest.raises(UserError, match=line):
        trained(tmp_path, *regression)
    regression[1] = str(tmp_path / "b")
    model = trained(tmp_path, *regression, "--standardize", "--lr", "0.1")
    assert all(np.isfinite(value).all() for value in model.values())
    with pytest.raises(
        UserError, match="standardize=True has no effect without a --model whose in"
    ):
        read(["--data", "library", "--standardize"])
