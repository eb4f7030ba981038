"""The small PyTorch models: sizes, shapes, what a position may see, and that they learn."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from parallel_sgd.torch import models


@pytest.fixture(autouse=True)
def seeded():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def tiny(**options):
    return models.ByteTransformer(16, 2, 4, context=12, **options)


def parameters(model):
    return sum(p.numel() for p in model.parameters())


def test_the_sizes_are_as_named():
    assert parameters(models.ResNet()) == 174_970
    assert parameters(models.ByteTransformer.of("5M")) == pytest.approx(5e6, rel=0.03)
    with torch.device("meta"):
        assert parameters(models.ByteTransformer.of("25M")) == pytest.approx(25e6, rel=0.03)
        tied = models.ByteTransformer.of("5M", tied=True)
        assert parameters(models.ByteTransformer.of("5M")) - parameters(tied) == 256 * 256


def test_shapes_of_the_resnet():
    for size, options, classes in [
        (28, {}, 10),
        (33, {"channels": (4, 8), "blocks": (1, 3), "classes": 7}, 7),
    ]:
        assert models.ResNet(**options)(torch.rand(3, 1, size, size)).shape == (3, classes)
    with pytest.raises(ValueError, match="zip"):
        models.ResNet(channels=(4, 8))


def test_images_do_not_see_each_other_once_trained():
    model, x = models.ResNet((4, 8), (1, 1)), torch.rand(3, 1, 28, 28)
    together, alone = model(x)[:1], model(x[:1])
    assert not torch.allclose(together, alone)  # batch normalization
    model.eval()
    torch.testing.assert_close(model(x)[:1], model(x[:1]))


def test_shapes_of_the_transformer():
    for time in (1, 5, 12):
        assert tiny()(torch.zeros(3, time, dtype=torch.int64)).shape == (3, time, 256)
    assert tiny(vocabulary=9)(torch.tensor([[8]])).shape == (1, 1, 9)


def test_a_position_sees_itself_and_those_before_it():
    model = tiny()
    x = torch.randint(256, (1, 12))
    logits = model(x)
    for place in range(12):
        other = x.clone()
        other[0, place] = (x[0, place] + 1) % 256
        differs = (model(other) != logits).any(dim=2)[0]
        assert not differs[:place].any() and differs[place:].all()
    torch.testing.assert_close(model(x[:, :5]), logits[:, :5])


def test_positions_count():
    model = tiny()
    h = model(torch.full((1, 12), 7))
    assert not torch.allclose(h[0, 0], h[0, 1])


def test_a_tied_head_is_the_embedding():
    model = tiny(tied=True)
    assert model.head.weight is model.embedding.weight
    assert "head.weight" not in dict(model.named_parameters())


def test_the_first_guess_is_nearly_uniform():
    for model in (tiny(), tiny(tied=True), models.ByteTransformer.of("5M", context=8)):
        y = torch.randint(256, (4, 8))
        loss = functional.cross_entropy(model(y).flatten(0, 1), y.flatten())
        assert loss.item() == pytest.approx(torch.tensor(256.0).log().item(), abs=0.3)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="x has 13 positions: must be at most context=12"):
        tiny()(torch.zeros(1, 13, dtype=torch.int64))
    with pytest.raises(ValueError, match="width=10 must be a multiple of heads=4"):
        models.ByteTransformer(10, 1, 4)
    with pytest.raises(ValueError, match="size='7B' must be one of '5M', '25M'"):
        models.ByteTransformer.of("7B")


@pytest.mark.parametrize("kind", ["resnet", "transformer", "tied"])
def test_a_step_lowers_the_loss(kind):
    if kind == "resnet":
        model, x, y = models.ResNet(), torch.rand(16, 1, 28, 28), torch.randint(10, (16,))
    else:
        model, text = tiny(tied=kind == "tied"), torch.randint(256, (8, 13))
        x, y = text[:, :-1], text[:, 1:]

    def loss():
        return functional.cross_entropy(model(x).flatten(0, -2), y.flatten())

    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    before = loss()
    before.backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())
    optimizer.step()
    assert loss() < before
