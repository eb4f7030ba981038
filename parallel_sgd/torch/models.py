"""Two plain `nn.Module`s for experiments: a small ResNet, and a byte-level transformer.

>>> import torch
>>> ResNet()(torch.zeros(2, 1, 28, 28)).shape
torch.Size([2, 10])
>>> ByteTransformer.of("5M")(torch.zeros(2, 100, dtype=torch.int64)).shape
torch.Size([2, 100, 256])
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor, nn
from torch.nn import functional

STD = 0.02  #: standard deviation of a transformer's initial weights


class ResNet(nn.Module):
    """A small residual network with batch normalization, for grey images.

    The first convolution halves height and width. A stage of residual blocks follows for each
    number of channels; each stage but the first halves height and width again. For images of 28 by
    28 and the defaults: 14 by 14, 7 by 7, 4 by 4; 174,970 parameters.

    Args:
        channels: of each stage.
        blocks: the number of residual blocks, with two convolutions each, for each of `channels`.
        classes: the number of classes.

    Source: He et al., "Deep residual learning for image recognition", 2015, section 4.2.
    """

    def __init__(
        self,
        channels: Sequence[int] = (16, 32, 64),
        blocks: Sequence[int] = (2, 2, 2),
        classes: int = 10,
    ) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, channels[0], 3, stride=2, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(channels[0])
        stages, before = [], channels[0]
        for stage, (width, count) in enumerate(zip(channels, blocks, strict=True)):
            for block in range(count):
                halves = stage > 0 and block == 0
                stages.append(ResidualBlock(before, width, stride=2 if halves else 1))
                before = width
        self.blocks = nn.Sequential(*stages)
        self.head = nn.Linear(before, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map images, float [n, 1, height, width], to logits, float [n, classes]."""
        x = functional.relu(self.first_norm(self.first(x)))  # [n, 16, 14, 14]
        x = self.blocks(x)  # [n, 64, 4, 4]
        return self.head(x.mean((2, 3)))


class ResidualBlock(nn.Module):
    """A block relu(shortcut(x) + conv(relu(conv(x)))), with batch normalization after convolutions.

    Args:
        before, after: channels.
        stride: of the first convolution; 2 halves height and width.
    """

    def __init__(self, before: int, after: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)
        self.shortcut = nn.Identity()
        if stride > 1 or before != after:
            project = nn.Conv2d(before, after, 1, stride=stride, bias=False)
            self.shortcut = nn.Sequential(project, nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        """Map [n, before, h, w] to [n, after, h / stride, w / stride]."""
        change = functional.relu(self.norm1(self.conv1(x)))
        change = self.norm2(self.conv2(change))
        return functional.relu(self.shortcut(x) + change)


class ByteTransformer(nn.Module):
    """A decoder-only transformer that predicts the next byte at every position.

    Normalization before attention and MLP, GELU, learned positions, no dropout.

    Args:
        width: of the vectors between layers; a multiple of `heads`.
        layers: the number of layers, with 12 · width² parameters each.
        heads: attention heads per layer.
        context: the largest number of positions.
        vocabulary: the number of tokens; 256 for bytes.
        tied: whether head and embedding share their weight, as a single parameter.
    Raises:
        ValueError: `width` is no multiple of `heads`.

    Source: Radford et al., "Language models are unsupervised multitask learners", 2019 (GPT-2),
    section 2.3; also the initial weights.
    """

    #: By the approximate number of parameters.
    SIZES: ClassVar[dict[str, dict[str, int]]] = {
        "5M": {"width": 256, "layers": 6, "heads": 4},
        "25M": {"width": 512, "layers": 8, "heads": 8},
    }

    def __init__(
        self,
        width: int,
        layers: int,
        heads: int,
        context: int = 256,
        vocabulary: int = 256,
        *,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.context = context
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.layers = nn.Sequential(*(TransformerLayer(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.apply(_initialize)
        for layer in self.layers:  # keeps the variance of the sum of 2 · layers residual branches
            for last in (layer.attention_out, layer.mlp_out):
                nn.init.normal_(last.weight, std=STD / math.sqrt(2 * layers))

    @classmethod
    def of(cls, size: str, context: int = 256, *, tied: bool = False) -> ByteTransformer:
        """Return a model of a named size, "5M" or "25M".

        Raises:
            ValueError: the size is unknown.
        """
        if size not in cls.SIZES:
            raise ValueError(f"size={size!r} must be one of {', '.join(map(repr, cls.SIZES))}")
        return cls(**cls.SIZES[size], context=context, tied=tied)

    def forward(self, x: Tensor) -> Tensor:
        """Map bytes, int64 [n, t], to logits of the byte after each, float [n, t, vocabulary].

        Raises:
            ValueError: t is more than the context.
        """
        time = x.shape[1]
        if time > self.context:
            raise ValueError(f"x has {time} positions: must be at most context={self.context}")
        h = self.embedding(x) + self.positions.weight[:time]  # [n, t, width]
        return self.head(self.norm(self.layers(h)))


class TransformerLayer(nn.Module):
    """A layer h + attention(norm(h)), followed by h + mlp(norm(h)); attention is causal."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width={width} must be a multiple of heads={heads}")
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.attention_in = nn.Linear(width, 3 * width)  # queries, keys, values
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def forward(self, h: Tensor) -> Tensor:
        """Map float [n, t, width] to the same shape."""
        h = h + self.attention(self.attention_norm(h))
        return h + self.mlp_out(functional.gelu(self.mlp_in(self.mlp_norm(h))))

    def attention(self, h: Tensor) -> Tensor:
        """Return causal means of the values, weighted by softmax(q · k / √d)."""
        q, k, v = (
            part.unflatten(2, (self.heads, -1)).transpose(1, 2)  # [n, heads, t, d]
            for part in self.attention_in(h).chunk(3, dim=2)
        )
        means = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.attention_out(means.transpose(1, 2).flatten(2))


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=STD)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
