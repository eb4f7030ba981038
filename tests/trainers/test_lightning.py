"""Lightning with compressed gradients."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest

lightning = pytest.importorskip("lightning")

import torch  # noqa: E402
from torch.nn.functional import cross_entropy  # noqa: E402
from two_ranks import RANKS, everywhere, total, values_of  # noqa: E402

import parallel_sgd as psgd  # noqa: E402
from parallel_sgd.errors import UserError  # noqa: E402

logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)


def module_of(package: Any, *, manual: bool = False, steps: int = 1) -> Any:
    """A module that takes its optimizer's steps itself, if `manual`: some in each minibatch."""

    class Module(package.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = torch.nn.Sequential(
                torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 3)
            )
            self.automatic_optimization = not manual

        def loss(self, batch: Any) -> torch.Tensor:
            x, y = batch
            return cross_entropy(self.layers(x), y)

        def training_step(self, batch: Any, number: int) -> torch.Tensor | None:
            if not manual:
                return self.loss(batch)
            optimizer = self.optimizers()
            for part in range(steps):
                optimizer.zero_grad()
                self.manual_backward(self.loss([values[part::steps] for values in batch]))
                optimizer.step()
            return None

        def validation_step(self, batch: Any, number: int) -> None:
            self.log("loss", self.loss(batch), sync_dist=True)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    return Module()


def loader() -> Any:
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    data = torch.utils.data.TensorDataset(x, x[:, :3].argmax(1))
    return torch.utils.data.DataLoader(data, batch_size=4)


def strategy_of(**options: Any) -> Any:
    return psgd.torch.LightningStrategy(
        **{"gradient_bits": 2, "find_unused_parameters": True, **options}
    )


def trainer_of(
    folder: Path, strategy: Any, *, package: Any = lightning, epochs: int = 1, **options: Any
) -> Any:
    """A Trainer with eight minibatches an epoch on each rank."""
    return package.Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy=strategy,
        max_epochs=epochs,
        **{
            "default_root_dir": folder,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            **options,
        },
    )


def trained(folder: Path, strategy: Any, *, resume: Any = None, **options: Any) -> Any:
    """Trainer and parameters."""
    trainer = trainer_of(folder, strategy, **options)
    assert trainer.world_size == RANKS
    module = module_of(options.get("package", lightning))
    trainer.fit(module, loader(), loader(), ckpt_path=resume)
    return trainer, values_of(module)


def test_gradients_are_compressed(folder: Path) -> None:
    trainer, values = trained(folder, strategy_of())
    report = trainer.strategy.handle.report()
    assert report["steps"] == 8 and 0 < report["bytes_sent"] < report["bytes_in_32_bit"] / 2
    _, plain = trained(folder, "ddp_find_unused_parameters_true")
    start = values_of(module_of(lightning))
    assert not torch.equal(values, plain)
    assert (values - plain).norm() < (plain - start).norm()
    _, full = trained(folder, strategy_of(gradient_bits=32))
    assert (full - plain).abs().max() < 1e-5


def test_accumulation_clipping_and_bfloat16(folder: Path) -> None:
    options = {"gradient_clip_val": 0.1, "precision": "bf16-mixed"}
    trainer, _ = trained(folder, strategy_of(), accumulate_grad_batches=4, **options)
    assert trainer.strategy.handle.steps == trainer.global_step == 2


def test_a_scaler(folder: Path) -> None:
    plugin = lightning.pytorch.plugins.MixedPrecision(
        "16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=8.0)
    )
    trainer, _ = trained(folder, strategy_of(), plugins=[plugin])
    assert trainer.strategy.handle.state_dict()["scale"] == 8.0


def test_manual_optimization(folder: Path) -> None:
    trainer = trainer_of(folder, strategy_of())
    module = module_of(lightning, manual=True)
    start = values_of(module)
    trainer.fit(module, loader())
    assert trainer.strategy.handle.steps == 8
    assert not torch.equal(values_of(module), start)


def test_a_resumed_fit_repeats_the_uninterrupted_one(folder: Path) -> None:
    keep = lightning.pytorch.callbacks.ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
    saving = {"enable_checkpointing": True, "callbacks": [keep]}
    _, values = trained(folder, strategy_of(), epochs=3, **saving)
    checkpoint = folder / "epoch=1.ckpt"
    assert {path.name for path in folder.glob("*.ckpt")} == {f"epoch={k}.ckpt" for k in range(3)}
    again, resumed = trained(folder, strategy_of(), epochs=3, resume=checkpoint)
    assert again.strategy.handle.steps == 24
    assert torch.equal(resumed, values)

    saved = torch.load(checkpoint, weights_only=True)
    states = saved["parallel_sgd"]["states"]
    assert [state["rank"] for state in states] == [*range(RANKS)]
    assert any(errors.any() for errors in total(states).values())
    if os.environ["RANK"] == "0":
        del saved["parallel_sgd"]
        torch.save(saved, folder / "without.ckpt")
    torch.distributed.barrier()
    _, with_zeros = trained(folder, strategy_of(), epochs=3, resume=folder / "without.ckpt")
    assert not torch.equal(with_zeros, values)


def test_several_fits_keep_the_residuals(folder: Path) -> None:
    """A checkpoint that is saved after fit has them, too."""
    trainer = trainer_of(folder, strategy_of())
    module = module_of(lightning)
    trainer.fit(module, loader())
    before = trainer.strategy.handle.state_dict()
    trainer.save_checkpoint(folder / "after.ckpt")
    trainer.save_checkpoint(folder / "weights.ckpt", weights_only=True)
    states = torch.load(folder / "after.ckpt", weights_only=True)["parallel_sgd"]["states"]
    expected = total(everywhere(before))
    assert all(torch.equal(sums, expected[name]) for name, sums in total(states).items())
    assert "parallel_sgd" not in torch.load(folder / "weights.ckpt", weights_only=True)

    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader())
    assert trainer.strategy.handle.steps == 16
    values_of(module)
    trainer.validate(module, loader())


def test_pytorch_lightning_is_another_package(folder: Path) -> None:
    package = pytest.importorskip("pytorch_lightning")
    with pytest.raises(UserError, match="both lightning and pytorch_lightning are imported"):
        strategy_of()
    trainer, _ = trained(folder, strategy_of(package="pytorch_lightning"), package=package)
    assert isinstance(trainer.strategy, package.strategies.DDPStrategy)
    assert trainer.strategy.handle.steps == 8


def test_what_is_refused() -> None:
    for given, error in (
        ({"gradient_bitz": 4}, "no option 'gradient_bitz': did you mean 'gradient_bits'"),
        ({"gradient_bits": 3000}, "gradient_bits=3000"),
        ({"ddp_comm_hook": print}, "ddp_comm_hook must not be given"),
        ({"package": "fabric"}, "package='fabric'"),
        ({"samples": len}, "samples= is only for algorithm="),
        ({"algorithm": "DiLoCo"}, "algorithm='DiLoCo' must be"),
        ({"algorithm": psgd.DiLoCo(), "gradient_bits": 4}, "has no argument 'gradient_bits'"),
    ):
        with pytest.raises(UserError, match=error):
            psgd.torch.LightningStrategy(**{"package": "lightning", **given})


ALGORITHMS = (
    psgd.DiLoCo(sync_steps=3, gradient_bits=4),
    psgd.BlockMomentumSGD(sync_steps=4),
    psgd.ModelAveragingSGD(sync_steps=2),
    psgd.DataParallelSGD(gradient_bits=2),
)


def learned(folder: Path, algorithm: Any, **options: Any) -> Any:
    given = {name: options.pop(name) for name in ("clip_norm", "samples") if name in options}
    strategy = psgd.torch.LightningStrategy(algorithm=algorithm, package="lightning", **given)
    return trained(folder, strategy, **options)


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda one: type(one).__name__)
def test_algorithms(folder: Path, algorithm: Any) -> None:
    """All ranks end with the same model; before that, those of local updates differ."""
    differ = []

    class Watch(lightning.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            weight = module.layers[0].weight
            differ.append(not all(torch.equal(weight, one) for one in everywhere(weight.detach())))

    trainer, values = learned(folder, algorithm, callbacks=[Watch()])
    start = values_of(module_of(lightning))
    assert (values - start).abs().max() > 0.01
    learner = trainer.strategy.learner
    assert learner.samples == 64 and learner.bytes_sent > 0
    assert len(differ) == 8 and any(differ) == (not algorithm.synchronizes_every_step)
    assert learner.access.is_closed


def test_gradients_by_the_learner_are_those_of_ddp(folder: Path) -> None:
    _, values = learned(folder, psgd.DataParallelSGD(gradient_bits=32))
    _, plain = trained(folder, "ddp")
    assert (values - plain).abs().max() < 1e-5


def full_precision() -> Any:
    return psgd.torch.LightningStrategy(algorithm=psgd.DataParallelSGD(), package="lightning")


def test_several_steps_in_a_minibatch_are_those_of_ddp(folder: Path) -> None:
    ends = []
    for strategy in (full_precision(), "ddp"):
        module = module_of(lightning, manual=True, steps=2)
        trainer_of(folder, strategy).fit(module, loader())
        ends.append(values_of(module))
    assert (ends[0] - ends[1]).abs().max() < 1e-5


def test_a_minibatch_without_samples_counts_none(folder: Path) -> None:
    """Neither does it count the samples of the minibatch before."""
    counts = iter([4, 0, 2, 0, 0, 4, 3, 0])
    trainer, _ = learned(folder, psgd.DataParallelSGD(), samples=lambda batch: next(counts))
    assert trainer.strategy.learner.samples == RANKS * 13


def test_averaged_weights_need_an_epoch_without_backward(folder: Path) -> None:
    ends = []
    for strategy in (full_precision(), "ddp"):
        average = lightning.pytorch.callbacks.StochasticWeightAveraging(0.01, swa_epoch_start=1)
        ends.append(trained(folder, strategy, epochs=3, callbacks=[average])[1])
    assert (ends[0] - ends[1]).abs().max() < 1e-5


@pytest.mark.parametrize(
    "algorithm",
    [ALGORITHMS[0], psgd.BlockMomentumSGD(sync_steps=3), ALGORITHMS[3]],
    ids=lambda a: type(a).__name__,
)
def test_an_algorithm_resumes_bit_for_bit(folder: Path, algorithm: Any) -> None:
    """In the midst of a block: 8 steps are no multiple of 3."""
    seen = {}

    class Watch(lightning.Callback):
        def on_validation_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            seen[trainer.current_epoch] = module.layers[0].weight.detach().clone()

    keep = lightning.pytorch.callbacks.ModelCheckpoint(
        folder, "{epoch}", save_top_k=2, monitor="loss", save_last=True
    )
    saving = {"enable_checkpointing": True, "callbacks": [Watch(), keep]}
    _, values = learned(folder, algorithm, epochs=3, **saving)
    saved = sorted(path.name for path in folder.glob("epoch=*"))
    assert len(saved) == 4 and all(f"{name}.parallel_sgd" in saved for name in saved[::2])
    first = min(folder.glob("epoch=?.ckpt"))
    again, resumed = learned(folder, algorithm, epochs=3, resume=first)
    assert again.strategy.learner.samples == 3 * 64
    assert torch.equal(resumed, values)
    state = torch.load(first, weights_only=True)
    assert torch.equal(state["state_dict"]["layers.0.weight"], seen[state["epoch"]])


def test_a_checkpoint_by_a_link_and_one_that_is_only_tested(folder: Path) -> None:
    keep = lightning.pytorch.callbacks.ModelCheckpoint(folder, "x", save_last="link")
    learned(folder, ALGORITHMS[0], callbacks=[keep], enable_checkpointing=True)
    last = folder / "last.ckpt"
    assert last.is_symlink()
    again, _ = learned(folder, ALGORITHMS[0], epochs=2, resume=last)
    assert again.strategy.learner.samples == 2 * 64
    again.fit_loop.max_epochs = 3
    again.validate(again.lightning_module, loader(), ckpt_path=last, weights_only=True)
    again.fit(again.lightning_module, loader())
    assert again.strategy.learner.samples == 64


def test_validation_has_the_common_model(folder: Path) -> None:
    seen = []

    class Watch(lightning.Callback):
        def on_validation_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
            if not trainer.sanity_checking:
                seen.append(module.layers[0].weight.detach().clone())
                assert not module.training and not torch.is_grad_enabled()

    options = {"callbacks": [Watch()], "val_check_interval": 1}
    trainer, _ = learned(folder, ALGORITHMS[0], epochs=1, **options)
    assert len(seen) == 64
    assert all(torch.equal(*pair) for pair in zip(*everywhere(seen), strict=True))
    trainer.validate(trainer.lightning_module, loader())


def test_an_algorithm_with_accumulation_and_a_scaler(folder: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    plugin = lightning.pytorch.plugins.MixedPrecision("16-mixed", "cpu", scaler)
    trainer, _ = learned(
        folder,
        psgd.DataParallelSGD(),
        clip_norm=0.1,
        samples=lambda batch: 3 * len(batch[0]),
        accumulate_grad_batches=4,
        plugins=[plugin],
    )
    assert trainer.global_step == 2 and trainer.strategy.learner.samples == 3 * 64
    assert trainer.strategy.learner.gradient_norm > 0.1
    assert scaler.get_scale() == 8 * 2 * 2  # the learner has updated the scaler


def test_what_an_algorithm_refuses(folder: Path) -> None:
    with pytest.raises(UserError, match=r"gradient_clip_val=0.5\) clips the gradient of one rank"):
        learned(folder, ALGORITHMS[0], gradient_clip_val=0.5)
    trainer = trainer_of(
        folder, psgd.torch.LightningStrategy(algorithm=ALGORITHMS[0], package="lightning")
    )
    module = module_of(lightning, manual=True)
    module.configure_optimizers = lambda: [torch.optim.SGD(module.parameters(), lr=0.1)] * 2
    with pytest.raises(UserError, match="must return one optimizer, and it has returned 2"):
        trainer.fit(module, loader())
    module = module_of(lightning)
    module.configure_optimizers = lambda: None
    with pytest.raises(UserError, match="must return one optimizer, and it has returned None"):
        trainer.fit(module, loader())
