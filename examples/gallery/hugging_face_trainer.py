"""Compress the gradients of Hugging Face's Trainer

A small BERT, with random weights, learns to tell Python code from English by 64 bytes of text. A
`transformers.Trainer` trains it on two ranks, with gradients of 32 bits and of 2 bits. One argument
makes the difference: `callbacks=[psgd.torch.TrainerCallback(gradient_bits=2)]`. This is for anyone
who has a program with a `Trainer`.

The figure shows the test accuracy against the megabytes that a rank has sent. Both runs take 40
steps and end at similar accuracies, but with 2 bits the ranks send a sixteenth of the bytes.

For your own model and data, add the argument to your `Trainer`, and start the program by
`torchrun`, or as below. [Hugging Face's Trainer](../trainers/transformers.md) describes
checkpoints, mixed precision and common mistakes.
"""

import argparse
import pydoc_data.topics
import tempfile

import numpy as np
import torch
from drawing import BLUE, VERMILION, label_ends, logarithmic, panels, save
from torch.utils.data import random_split
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    PrinterCallback,
    Trainer,
    TrainingArguments,
)

import parallel_sgd as psgd

LENGTH, PER_CLASS, TEST = 64, 2000, 200
BITS = {32: VERMILION, 2: BLUE}


def samples():
    """Return sequences of bytes with their class: 0 for Python code, 1 for English."""
    code, _ = psgd.data.library_sequences(LENGTH, most_bytes=400_000)
    text = " ".join(pydoc_data.topics.topics.values()).encode()
    english = torch.tensor(list(text[: PER_CLASS * LENGTH])).view(PER_CLASS, LENGTH)
    x = [*torch.tensor(code.read(np.arange(PER_CLASS))[0]), *english]
    return [{"input_ids": ids, "labels": i // PER_CLASS} for i, ids in enumerate(x)]


def train(bits, training, test, steps, folder):
    """Return megabytes sent, and accuracies after these megabytes, with gradients of some bits."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=256,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=LENGTH,
    )
    arguments = TrainingArguments(
        folder,
        max_steps=steps,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=100,
        learning_rate=4e-3,
        eval_strategy="steps",
        eval_steps=8,
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        report_to=[],
        use_cpu=True,
        ddp_find_unused_parameters=False,
        average_tokens_across_devices=False,  # True doubles the loss on two ranks
    )
    callback = psgd.torch.TrainerCallback(gradient_bits=bits)
    trainer = Trainer(
        model=BertForSequenceClassification(config),
        args=arguments,
        train_dataset=training,
        eval_dataset=test,
        compute_metrics=lambda of: {"accuracy": (of.predictions.argmax(1) == of.label_ids).mean()},
        callbacks=[callback],  # the line
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    scores = [line for line in trainer.state.log_history if "eval_accuracy" in line]
    sent = callback.handle.bytes_sent / callback.handle.steps / 1e6
    return [sent * score["step"] for score in scores], [score["eval_accuracy"] for score in scores]


def draw(runs, path):
    figure, axes = panels(title="A BERT by Hugging Face's Trainer, on two ranks")
    for bits, (sent, accuracies) in runs.items():
        percent = [100 * accuracy for accuracy in accuracies]
        axes.plot(sent, percent, "o-", color=BITS[bits], label=f"{bits} bits")
    axes.set(xlabel="MB sent by each rank", ylabel="test accuracy, %")
    logarithmic(axes)
    label_ends(axes)
    save(figure, path)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--figure", default="hugging_face_trainer.png", metavar="PATH")
    options = parser.parse_args()
    comm, runs = psgd.Communicator.world(), {}
    data = samples()
    training, test = random_split(data, [len(data) - TEST, TEST], torch.Generator().manual_seed(0))
    with tempfile.TemporaryDirectory() as folder:
        for bits in BITS:
            sent, accuracies = runs[bits] = train(bits, training, test, options.steps, folder)
            comm.print(f"{bits} bits: {sent[-1]:.1f} MB sent, test accuracy {accuracies[-1]:.1%}")
    if comm.rank == 0:
        draw(runs, options.figure)


if __name__ == "__main__":
    main()
