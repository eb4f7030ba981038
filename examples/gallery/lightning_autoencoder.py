"""Train a Lightning module by few bits, or by few exchanges

A `LightningModule`, an autoencoder of handwritten digits, trains on two ranks four times. The runs
differ by one argument of Lightning's `Trainer`, `strategy=psgd.torch.LightningStrategy(...)`. With
`gradient_bits=4` the ranks exchange gradients of 4 bits. With
`algorithm=psgd.DiLoCo(sync_steps=20)` each rank takes 20 steps alone, and then the ranks exchange
the changes. The two can be combined. This is for anyone whose program uses Lightning.

The figure shows the test loss against the megabytes that a rank has sent. With 4 bits the loss
falls as with 32 bits, with an eighth of the bytes. DiLoCo sends a twentieth of the bytes. Its loss
is a little higher after the same number of steps. The small images are test images and their
reconstructions.

For your own module, give your `Trainer` the argument, and start the program by `torchrun`, or as
below. [Lightning](../trainers/lightning.md) describes other algorithms, checkpoints and common
mistakes.
"""

import argparse
import logging

import lightning
import torch
from drawing import PALETTE, logarithmic, panels, save
from torch import nn
from torch.nn.functional import mse_loss, pad
from torch.utils.data import DataLoader, TensorDataset

import parallel_sgd as psgd

EPOCHS = 7
STRATEGIES = {
    "32 bits": {"gradient_bits": 32},
    "4 bits": {"gradient_bits": 4},
    "DiLoCo": {"algorithm": psgd.DiLoCo(sync_steps=20)},
    "DiLoCo, 4 bits": {"algorithm": psgd.DiLoCo(sync_steps=20, gradient_bits=4)},
}


class Autoencoder(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8))
        self.decoder = nn.Sequential(nn.Linear(8, 128), nn.ReLU(), nn.Linear(128, 64))
        self.curve = []  # of (megabytes sent, test loss)

    def forward(self, x):
        return self.decoder(self.encoder(x))

    def training_step(self, batch, _):
        return mse_loss(self(batch[0]), batch[0])

    def validation_step(self, batch, _):
        self.log("test loss", mse_loss(self(batch[0]), batch[0]), sync_dist=True)

    def on_train_epoch_end(self):
        strategy = self.trainer.strategy
        sent = (getattr(strategy, "learner", None) or strategy.handle).bytes_sent
        self.curve.append((sent / 1e6, self.trainer.callback_metrics["test loss"].item()))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=3e-3)


def train(strategy, train, test):
    torch.manual_seed(0)
    model = Autoencoder()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=psgd.torch.LightningStrategy(**strategy),  # the line
        max_epochs=EPOCHS,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(train, 16, shuffle=True), DataLoader(test, 60))
    return model


def draw(models, x, path):
    """Draw losses against megabytes, and the images x [10, 64] with their reconstructions."""
    figure, axes = panels(title="An autoencoder in Lightning, on two ranks")
    for (name, model), color in zip(models.items(), PALETTE, strict=False):
        axes.plot(*zip(*model.curve, strict=True), "o-", markersize=4, color=color)
        axes.annotate(name, model.curve[0], (6, 0), color=color, textcoords="offset points")
    axes.set(xlabel="MB sent by each rank", ylabel="test loss after each epoch")
    logarithmic(axes, "xy")
    with torch.no_grad():
        rows = {"test images": x} | {name: model(x) for name, model in models.items()}
    images = pad(torch.stack(list(rows.values())).view(-1, 10, 8, 8), (1, 1, 1, 1))
    inset = axes.inset_axes((0.6, 0.6, 0.4, 0.4))
    inset.imshow(images.transpose(1, 2).flatten(2).flatten(0, 1), cmap="gray_r", vmin=0, vmax=1)
    inset.set_yticks(range(5, 10 * len(rows), 10), rows)
    inset.set_xticks([])
    inset.tick_params(length=0)
    inset.spines[:].set_visible(False)
    save(figure, path)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--figure", default="lightning_autoencoder.png", metavar="PATH")
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    comm = psgd.Communicator.world()
    training, test = psgd.data.digits()
    x, y = map(torch.tensor, test.arrays())
    models = {}
    for name, strategy in STRATEGIES.items():
        images = torch.tensor(training.arrays()[0])
        models[name] = train(strategy, TensorDataset(images), TensorDataset(x))
        sent, loss = models[name].curve[-1]
        comm.print(f"{name}: {sent:.2f} MB sent, test loss {loss:.4f}", flush=True)
    if comm.rank == 0:
        first = torch.stack([x[y == digit][0] for digit in range(10)])
        draw(models, first, options.figure)


if __name__ == "__main__":
    main()
