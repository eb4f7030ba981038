"""Fine-tune a small Llama by LoRA, with gradients of 4 bits

A small Llama, trained on Python's source code, is fine-tuned on English in two ways: with all its
weights, and by LoRA. The Llama begins with random weights, and reads bytes. The English is that of
Python's help texts. LoRA comes from [PEFT](https://github.com/huggingface/peft): it trains small
adapters, while the model's own weights stay frozen. All learners exchange gradients of 4 bits. This
is for anyone who fine-tunes a language model over a slow network.

A learner exchanges only the gradients of parameters that are trained. So the two savings multiply:
the adapters have fewer values than the model, and each value has fewer bits. The left of the figure
shows the bytes of a step: the bytes that are sent, and above them the bytes that 32 bits would
take. On the right is the test loss against the bytes sent. In a model as small as this one, a step
of all weights lowers the loss more than a step of the adapters. But in this run the adapters reach
a lower loss with the same number of bytes.

For your own model, replace `LlamaForCausalLM(config)` by `from_pretrained`, and the two texts by
your tokens: a data set has an item (x, y) for each sample. For a program with a `Trainer` in
place of a loop, see [Hugging Face's Trainer](../trainers/transformers.md).
"""

import argparse
import copy
import pydoc_data.topics

import torch
from drawing import BLUE, VERMILION, logarithmic, panels, save
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader, TensorDataset, random_split
from transformers import LlamaConfig, LlamaForCausalLM

import parallel_sgd as psgd

CONTEXT, MINIBATCH, TEST = 64, 16, 32
STEPS = 60  # of fine-tuning


def texts():
    """Return sequences of Python code, and of English to train and to test on."""
    code, _ = psgd.data.library_sequences(CONTEXT, most_bytes=400_000)
    text = " ".join(pydoc_data.topics.topics.values()).encode()
    x = torch.tensor(list(text[: len(text) // CONTEXT * CONTEXT])).view(-1, CONTEXT)
    english = TensorDataset(x, x)
    return code, *random_split(
        english, [len(english) - TEST, TEST], torch.Generator().manual_seed(0)
    )


def loss_of(model, x):
    return model(input_ids=x, labels=x).loss  # of predicting each next byte


def train(comm, name, model, lr, steps, data, test):
    """Train what is not frozen; return the bytes of 32-bit gradients, bytes sent, test losses."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=lr)
    algorithm = psgd.DataParallelSGD(gradient_bits=4)
    learner = psgd.torch.Learner(model, optimizer, algorithm, comm, clip_norm=1.0)
    loader = DataLoader(data, batch_sampler=psgd.torch.sampler(data, learner, MINIBATCH))
    test_loader = DataLoader(test, TEST, sampler=range(comm.rank, len(test), comm.size))

    sent, losses = [], []
    for step, (x, _) in enumerate(loader):
        if step in (0, 2, 5, 10, 20, 40, steps):
            score = learner.evaluate(test_loader, lambda model, x, _: {"loss": loss_of(model, x)})
            sent.append(learner.bytes_sent)
            losses.append(score["loss"])
        if step == steps:
            break
        loss_of(model, x).backward()
        learner.step(samples=len(x))
    learner.finish()
    learner.close()
    full = sum(4 * p.numel() for p in trained)
    comm.print(
        f"{name}: {sent[-1] / steps:,.0f} bytes sent a step, gradients of {full:,} bytes; "
        f"loss on English {losses[0]:.2f}, then {losses[-1]:.2f}",
        flush=True,
    )
    return full, sent, losses


def draw(runs, path):
    figure, (left, right) = panels(2, title="Fine-tuning a Llama on English, on two ranks")
    for (name, (full, sent, losses)), color in zip(runs.items(), (VERMILION, BLUE), strict=True):
        for bits, size, alpha in ((32, full, 0.4), (4, sent[-1] / STEPS, 1)):
            bar = left.barh(f"{name},\n{bits} bits", size / 1000, color=color, alpha=alpha)
            left.bar_label(bar, fmt="%.0f", padding=3)
        right.plot([bytes_ / 1e6 for bytes_ in sent[1:]], losses[1:], "o-", color=color)
        offset = (-32, -16) if color == BLUE else (8, -4)
        end = (sent[-1] / 1e6, losses[-1])
        right.annotate(name, end, offset, textcoords="offset points", color=color)
    left.set(xlabel="kB sent in a step", xlim=(0, 600))
    left.invert_yaxis()
    left.grid(visible=False)
    right.set(xlabel="MB sent by each rank", ylabel="test loss, nats a byte")
    logarithmic(right)
    right.set_xticks([0.01, 0.1, 1])
    save(figure, path)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--figure", default="lora.png", metavar="PATH")
    options = parser.parse_args()
    comm = psgd.Communicator.world()
    torch.manual_seed(0)
    code, english, test = texts()
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=CONTEXT,
    )
    base = LlamaForCausalLM(config)
    train(comm, "base", base, 1e-2, 100, code, test)
    adapters = LoraConfig(r=4, lora_alpha=16, target_modules="all-linear")
    adapted = get_peft_model(copy.deepcopy(base), adapters)
    runs = {
        "all weights": train(comm, "all weights", base, 5e-3, STEPS, english, test),
        "LoRA": train(comm, "LoRA", adapted, 2e-2, STEPS, english, test),
    }
    if comm.rank == 0:
        draw(runs, options.figure)


if __name__ == "__main__":
    main()
