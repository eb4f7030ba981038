"""Draw handwritten digits with a GAN, by two learners

A generator turns noise and a class into the image of a digit, and a discriminator tells real images
from generated ones. Both networks train on two ranks, with gradients of 4 bits. This is for anyone
who trains several models at a time: GANs, actors and critics, teachers and students. Each network
has its optimizer and its `psgd.torch.Learner`, and both learners share a communicator.

All ranks call the learners' steps in the same order. As in any GAN, the generator's loss leaves a
gradient in the discriminator as well, and `zero_grad` clears this gradient before the
discriminator's next `backward`. The generator has BatchNorm: `evaluation` averages its statistics
over the ranks.

The upper rows of the figure show what the generator draws from the same noise after more and more
epochs. The last rows are real images. To get the percentage, a nearest-neighbor classifier that
knows only real digits looks at 500 generated digits. The percentage is the share that it recognizes
as the class that was asked for.

For your own images, replace `psgd.data.digits()` and the two networks. One sampler divides the
images among the ranks, and both learners count the same samples. [PyTorch](../pytorch.md) has more
on learners.
"""

import argparse

import torch
from drawing import BLUE, VERMILION, label_ends, panels, save
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, one_hot, pad
from torch.utils.data import DataLoader

import parallel_sgd as psgd

NOISE, PIXELS, CLASSES, WIDTH = 16, 64, 10, 128
EPOCHS, SHOWN = 22, (4, 10, 22)


class Conditional(nn.Sequential):
    """Layers whose input is x [n, …] and the class y [n] of each row."""

    def forward(self, x, y):
        return super().forward(torch.cat([x, one_hot(y, CLASSES)], dim=1))


def networks():
    """Return the generator and the discriminator."""
    layers = [nn.Linear(NOISE + CLASSES, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU()]
    layers += [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU()]
    generator = Conditional(*layers, nn.Linear(WIDTH, PIXELS), nn.Sigmoid())
    layers = [nn.Linear(PIXELS + CLASSES, WIDTH), nn.LeakyReLU(0.2), nn.Dropout(0.3)]
    layers += [nn.Linear(WIDTH, WIDTH), nn.LeakyReLU(0.2), nn.Dropout(0.3)]
    return generator, Conditional(*layers, nn.Linear(WIDTH, 1))


def learner_of(model, lr, comm):
    optimizer = torch.optim.Adam(model.parameters(), lr=lr, betas=(0.5, 0.99))
    return psgd.torch.Learner(model, optimizer, psgd.DataParallelSGD(gradient_bits=4), comm)


def loss_if(real, logits):
    return binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(real)))


def recognized(images, classes, x, y):
    """Return the share of images whose nearest real image in x [n, 64] has the right class."""
    return (y[torch.cdist(images, x).argmin(dim=1)] == classes).float().mean().item()


def draw(rows, losses, path):
    figure, (left, right) = panels(2, title="A GAN's digits and losses, with gradients of 4 bits")
    images = torch.stack(list(rows.values())).view(-1, CLASSES, 8, 8)  # two digits of each class
    sheet = pad(images, (1, 1, 1, 1)).transpose(1, 2).reshape(-1, CLASSES * 10)
    left.imshow(sheet, cmap="gray_r")
    left.set_yticks(range(10, len(sheet), 20), rows)
    left.set_xticks(range(5, CLASSES * 10, 10), range(CLASSES))
    left.tick_params(length=0, labeltop=True, labelbottom=False)
    left.spines[:].set_visible(False)
    left.grid(visible=False)
    judged, generated = zip(*losses, strict=True)
    epochs = range(1, EPOCHS + 1)
    right.plot(epochs, judged, color=BLUE, label="discriminator")
    right.plot(epochs, generated, color=VERMILION, label="generator")
    right.set(xlabel="epoch", ylabel="training loss", ylim=0)
    label_ends(right)
    save(figure, path)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--figure", default="gan.png", metavar="PATH")
    options = parser.parse_args()
    comm = psgd.Communicator.world()
    torch.manual_seed(0)
    generator, discriminator = networks()
    generating = learner_of(generator, 1.5e-3, comm)
    judging = learner_of(discriminator, 3e-3, comm)
    digits, _ = psgd.data.digits()
    real_x, real_y = map(torch.tensor, digits.arrays())
    loader = DataLoader(digits, batch_sampler=psgd.torch.sampler(digits, judging, 64))
    same_noise, classes = torch.randn(500, NOISE), torch.arange(500) % CLASSES
    torch.manual_seed(1 + comm.rank)  # each rank draws its own noise

    rows, losses = {}, []
    for epoch in loader.batch_sampler.epochs(EPOCHS):
        sums = torch.zeros(2)
        for x, y in loader:
            fake = generator(torch.randn(len(x), NOISE), y)
            discriminator.zero_grad()
            judged = loss_if(True, discriminator(x, y))
            judged = judged + loss_if(False, discriminator(fake.detach(), y))
            judged.backward()
            judging.step(samples=len(x))

            generated = loss_if(True, discriminator(fake, y))
            generated.backward()
            generating.step(samples=len(x))
            sums += torch.stack([judged.detach(), generated.detach()])
        losses.append((sums / len(loader)).tolist())
        if epoch + 1 in SHOWN:
            with generating.evaluation():
                images = generator(same_noise, classes)
            share = recognized(images, classes, real_x, real_y)
            rows[f"epoch {epoch + 1}:\n{share:.0%}"] = images[: 2 * CLASSES]
    comm.print(f"after {EPOCHS} epochs {share:.0%} of the generated digits are recognized")
    values = sum(p.numel() for p in [*generator.parameters(), *discriminator.parameters()])
    sent, full = generating.bytes_sent + judging.bytes_sent, 4 * values * EPOCHS * len(loader)
    comm.print(f"each rank sent {sent / 1e6:.1f} MB; 32 bits a value are {full / 1e6:.1f} MB")
    generating.finish()
    judging.finish()
    if comm.rank == 0:
        examples = [real_x[real_y == digit][:2] for digit in range(CLASSES)]
        rows["real"] = torch.stack(examples, dim=1).flatten(0, 1)
        draw(rows, losses, options.figure)


if __name__ == "__main__":
    main()
