"""Train a transformer on bytes of text: `parallel-sgd run -n 4 examples/torch_language.py --help`.

With --checkpoints it goes on where it was stopped, in the midst of an epoch, also on another number
of ranks.
"""

import argparse
import math

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import parallel_sgd as psgd
from parallel_sgd.torch.models import ByteTransformer

ALGORITHMS = {
    "data-parallel": lambda bits: psgd.DataParallelSGD(gradient_bits=bits),
    "block-momentum": lambda bits: psgd.BlockMomentumSGD(sync_steps=20, gradient_bits=bits),
    "power": lambda bits: psgd.PowerSGD(rank=4),
}
OPTIMIZERS = {
    "adamw": lambda p, lr: torch.optim.AdamW(p, lr=lr, betas=(0.9, 0.95), weight_decay=0.1),
    "momentum": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9),
}


def parsed():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=["tiny", *ByteTransformer.SIZES], default="5M")
    parser.add_argument("--data", default="library", metavar="FOLDER", help="of text files")
    parser.add_argument("--test", type=float, metavar="FRACTION", help="of the folder's bytes")
    parser.add_argument("--context", type=int, default=256, help="bytes of a sequence")
    parser.add_argument("--algorithm", choices=ALGORITHMS, default="data-parallel")
    parser.add_argument("--gradient-bits", type=float, default=4, help="of power: not used")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw")
    parser.add_argument("--lr", type=float, default=1e-3, help="the highest; momentum wants more")
    parser.add_argument("--minibatch", type=int, default=32, help="sequences of all ranks")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--steps", type=int, help="to stop after, before the epochs are over")
    parser.add_argument("--evaluate-every", type=int, default=200, metavar="STEPS")
    parser.add_argument("--amp", choices=["no", "bf16"], default="no", help="autocast")
    parser.add_argument("--compile", choices=["no", "yes"], default="no", help="torch.compile")
    parser.add_argument("--checkpoints", metavar="FOLDER", help="saved at each evaluation")
    return parser.parse_args()


def rate(step, steps):
    """The learning rate's share of the highest one: up for 5 % of the steps, then a cosine."""
    rise = max(1, steps // 20)
    return min((step + 1) / rise, 0.55 + 0.45 * math.cos(math.pi * min(1, step / steps)))


def main():
    options = parsed()
    comm = psgd.Communicator.world()
    torch.manual_seed(0)
    if options.data == "library":
        train, test = psgd.data.library_sequences(options.context)
    else:
        folder, context, fraction = options.data, options.context, options.test
        train, test = psgd.data.text_sequences(folder, context, fraction, suffixes=[""])
    sizes = {**ByteTransformer.SIZES, "tiny": {"width": 32, "layers": 2, "heads": 2}}
    model = ByteTransformer(**sizes[options.model], context=options.context)
    forward = torch.compile(model) if options.compile == "yes" else model
    optimizer = OPTIMIZERS[options.optimizer](model.parameters(), options.lr)
    algorithm = ALGORITHMS[options.algorithm](options.gradient_bits)
    learner = psgd.torch.Learner(model, optimizer, algorithm, comm, clip_norm=1.0)
    sampler = psgd.torch.sampler(train, learner, options.minibatch)
    loader = DataLoader(train, batch_sampler=sampler)
    test_loader = DataLoader(test, 16, sampler=range(comm.rank, len(test), comm.size))
    steps = min(options.steps or math.inf, options.epochs * len(sampler))

    def loss_of(x, y):
        with torch.autocast("cpu", torch.bfloat16, enabled=options.amp == "bf16"):
            logits = forward(x)
        return cross_entropy(logits.float().flatten(0, 1), y.flatten())

    def steps_done():
        """Of each epoch the last minibatch may be a smaller one."""
        epochs, rest = divmod(learner.samples, len(train))
        return epochs * len(sampler) + math.ceil(rest / options.minibatch)

    checkpoints = None
    if options.checkpoints:
        facts = {"data": options.data, "minibatch": options.minibatch}
        checkpoints = psgd.Checkpoints(options.checkpoints, facts=facts)
        if loaded := psgd.resume(learner, options.checkpoints, facts=facts):
            comm.print(f"goes on after step {steps_done()} from {loaded.path}")

    def evaluated():
        scores = learner.evaluate(test_loader, lambda _, x, y: {"loss": loss_of(x, y)})
        if not scores:  # a rank has failed, and training has rolled back
            return
        loss = scores["loss"]
        sent = f"{learner.bytes_sent:,} bytes sent by each rank"
        comm.print(f"step {steps_done()}: test loss {loss:.4f} nats a byte, {sent}", flush=True)
        if checkpoints:
            checkpoints.save(learner, metric=loss)

    def train_to_the_end():
        for _ in sampler.epochs(options.epochs):
            for x, y in loader:
                step = steps_done()
                for group in optimizer.param_groups:
                    group["lr"] = options.lr * rate(step, steps)
                loss_of(x, y).backward()
                learner.step(samples=len(x))
                if step + 1 >= steps:
                    return
                if (step + 1) % options.evaluate_every == 0:
                    evaluated()

    if steps_done() < steps:
        train_to_the_end()
    learner.finish()
    evaluated()
    if checkpoints:
        checkpoints.close()


if __name__ == "__main__":
    main()
