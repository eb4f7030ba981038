"""Train an LSTM on sequences of unequal length

An LSTM reads lines of Python's library, of 4 to 100 bytes, and tells code from prose. This is for
anyone whose samples are sequences, such as sentences, series or recordings. `SequenceSource` makes
minibatches of at most 2,048 bytes, and divides the sequences of each minibatch among the ranks.

Every point on the left of the figure is one rank's part of a minibatch. Some parts have twice as
many lines as others, but all have about 1,000 bytes, except in the last minibatch. So the ranks
work equally long, and neither waits for the other. On the right are seven test lines of code, and
below them seven of prose. The colors show what the LSTM believes after each byte: blue for code,
orange for prose.

For your own data, give `SequenceSource` a list of arrays (here bytes; ids of words or vectors work
too), and a class for each. [Data](../data.md#sequences) explains sequences with a label for every
token, and [torch_lstm.py](../../examples/torch_lstm.py) trains on such sequences.
"""

import argparse
import ast
from pathlib import Path

import numpy as np
import torch
from drawing import ORANGE, PALETTE, SKY, mixed, panels, save
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pack_padded_sequence

import parallel_sgd as psgd

SHOWN = 44  # bytes of a line in the figure, at most


def lines_of_library(count, longest=100):
    """Return lines as arrays of bytes, and classes: 1 for docstrings and comments, 0 for code."""
    found = []
    for file in sorted(Path(ast.__file__).parent.glob("*.py"))[:30]:
        source, inside = file.read_text("utf-8"), set()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                inside.update(range(node.lineno, node.end_lineno + 1))
        for number, line in enumerate(source.splitlines(), 1):
            text = line.strip(" #\"'")  # without the signs that tell
            if len(text) >= 4:
                prose = number in inside or line.lstrip().startswith("#")
                found.append((np.frombuffer(text.encode()[:longest], np.uint8), int(prose)))
    np.random.default_rng(0).shuffle(found)
    return [line for line, _ in found[:count]], np.array([kind for _, kind in found[:count]])


class Reader(torch.nn.Module):
    """The class of a sequence, from the LSTM's state after the last byte."""

    def __init__(self, width=64):
        super().__init__()
        self.embedding = torch.nn.Embedding(256, width)
        self.lstm = torch.nn.LSTM(width, width, batch_first=True)
        self.output = torch.nn.Linear(width, 2)

    def forward(self, values, lengths):  # [m, longest], [m]
        x = self.embedding(values)
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        _, (state, _) = self.lstm(packed)  # [1, m, width]
        return self.output(state[0])


def tensors(x, y):
    return torch.from_numpy(x.values), torch.from_numpy(x.lengths), torch.from_numpy(y)


def score(model, values, lengths, classes):
    logits = model(values, lengths)
    right = (logits.argmax(1) == classes).float().mean()
    return {"loss": cross_entropy(logits, classes), "accuracy": right}


@torch.no_grad()
def draw(model, lines, parts, path):
    figure, (left, right) = panels(2, title="An LSTM on lines of code and prose, on two ranks")
    for rank, (own, color) in enumerate(zip(parts, PALETTE, strict=False)):
        left.plot(own[:, 0], own[:, 1], ".", color=color, label=f"rank {rank}")
    left.set(xlabel="lines in a part of a minibatch", ylabel="bytes in this part", ylim=0)
    left.legend(frameon=False, loc="lower right")
    right.set_title("test lines: blue reads as code, orange as prose", fontsize=9)
    right.set_axis_off()
    believed = np.full((len(lines), SHOWN), np.nan)
    style = {"family": "monospace", "fontsize": 7, "ha": "center", "va": "center"}
    for row, line in enumerate(lines):
        starts = torch.arange(1, len(line) + 1)  # of what follows a start, nothing is read
        logits = model(torch.tensor(line).long().expand(len(line), -1), starts)
        believed[row, : len(line)] = logits.softmax(1)[:, 1]
        for column, byte in enumerate(line):
            right.text(column, row, chr(byte), parse_math=False, **style)
    right.imshow(believed, cmap=mixed(SKY, "white", ORANGE), vmin=0, vmax=1, aspect="auto")
    save(figure, path)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lines", type=int, default=6000, help="to train and to test on")
    parser.add_argument("--tokens", type=int, default=2048, help="of a minibatch, at most")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--gradient-bits", type=float, default=4)
    parser.add_argument("--figure", default="lstm_lines.png", metavar="PATH")
    options = parser.parse_args()
    comm = psgd.Communicator.world()
    lines, classes = lines_of_library(options.lines)
    tested = options.lines // 10
    test = psgd.data.SequenceArrays(lines[:tested], classes[:tested])
    source = psgd.data.SequenceSource(
        lines[tested:], classes[tested:], options.tokens, unit="tokens", epochs=options.epochs
    )
    torch.manual_seed(0)
    model = Reader()
    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)
    algorithm = psgd.DataParallelSGD(gradient_bits=options.gradient_bits)
    learner = psgd.torch.Learner(model, optimizer, algorithm, comm)
    parts = []  # of minibatches, those of this rank: lines and bytes
    for x, y in source.minibatches(learner):
        values, lengths, targets = tensors(x, y)
        loss = cross_entropy(model(values, lengths), targets, reduction="sum")
        (loss / x.tokens).backward()  # so a line counts the same on every rank
        learner.step(samples=x.tokens)
        parts.append([len(x.lengths), x.tokens])
    own = np.array_split(np.arange(comm.rank, len(test), comm.size), 8)
    batches = [tensors(*test.read(part)) for part in own]
    scores = learner.evaluate(batches, score, samples=lambda batch: len(batch[-1]))
    comm.print("test loss {loss:.3f}, accuracy {accuracy:.1%}".format(**scores))
    everywhere = np.empty((comm.size, len(parts), 2))
    comm.allgather(np.array(parts, float).ravel(), everywhere.ravel(), [2 * len(parts)] * comm.size)
    learner.close()
    if comm.rank == 0:
        short = [i for i in range(tested) if 12 <= len(lines[i]) <= SHOWN]
        shown = [i for kind in (0, 1) for i in [i for i in short if classes[i] == kind][:7]]
        draw(model, [lines[i] for i in shown], everywhere, options.figure)


if __name__ == "__main__":
    main()
