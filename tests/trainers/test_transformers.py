"""Hugging Face's Trainer with compressed gradients."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

import torch  # noqa: E402
from accelerate.state import AcceleratorState  # noqa: E402
from accelerate.utils import DistributedType  # noqa: E402
from two_ranks import RANKS, everywhere, total, values_of  # noqa: E402

import parallel_sgd as psgd  # noqa: E402
from parallel_sgd.errors import UserError  # noqa: E402

WORDS = 40  #: of the vocabulary


def gpt2() -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


def bert() -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=WORDS,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=16,
    )
    return transformers.BertForMaskedLM(config)


def llama_lora() -> torch.nn.Module:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=16,
    )
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    return peft.get_peft_model(transformers.LlamaForCausalLM(config), lora)


class Sentences(torch.utils.data.Dataset):
    def __init__(self) -> None:
        self.words = torch.randint(1, WORDS, (64, 8), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.words[index], "labels": self.words[index]}


def trained(
    folder: Path,
    *,
    model: torch.nn.Module | None = None,
    callback: Any = None,
    resume: str | Path | None = None,
    **arguments: Any,
) -> tuple[torch.Tensor, Any, Any]:
    """Parameters, the Trainer and the callback after some steps."""
    options = {
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "learning_rate": 0.01,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
        "seed": 3,
    }
    callback = callback or psgd.torch.TrainerCallback(gradient_bits=2)
    trainer = transformers.Trainer(
        model or gpt2(),
        transformers.TrainingArguments(str(folder), **{**options, **arguments}),
        train_dataset=Sentences(),
        eval_dataset=Sentences(),
        callbacks=[callback] if callback != "none" else [],
    )
    trainer.train(resume_from_checkpoint=resume and str(resume))
    return values_of(trainer.model), trainer, callback


def sent_bytes(callback: Any, model: torch.nn.Module) -> float:
    """The bytes that a rank has sent in a step, for each byte of the gradient."""
    gradient = 4 * sum(p.numel() for p in model.parameters() if p.requires_grad)
    return callback.handle.bytes_sent / callback.handle.steps / gradient


@pytest.mark.parametrize("make", [gpt2, bert, llama_lora])
def test_gradients_are_compressed(folder: Path, make: Any) -> None:
    """All ranks have the same parameters, which differ from those without compression."""
    values, trainer, callback = trained(folder, model=make())
    plain, *_ = trained(folder, model=make(), callback="none")
    start = values_of(make())
    assert callback.handle.steps == 4
    assert 0 < sent_bytes(callback, trainer.model) < 0.5
    assert not torch.equal(values, plain)
    assert (values - plain).norm() < (plain - start).norm()


def test_full_precision_is_that_of_ddp(folder: Path) -> None:
    callback = psgd.torch.TrainerCallback(gradient_bits=32)
    values, *_ = trained(folder, callback=callback)
    plain, *_ = trained(folder, callback="none")
    assert (values - plain).abs().max() < 1e-6


def test_a_compiled_model(folder: Path) -> None:
    """The wrapper of torch.compile is around DDP."""
    values, _, callback = trained(folder, torch_compile=True, torch_compile_backend="eager")
    assert callback.handle.steps == 4
    plain, *_ = trained(folder)
    assert torch.allclose(values, plain, atol=1e-6)


def test_accumulation_clipping_evaluation_and_bfloat16(folder: Path) -> None:
    """Only the last minibatch of a step is exchanged."""
    options = {
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.1,
        "bf16": True,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "eval_on_start": True,
        "gradient_checkpointing": True,
        "logging_steps": 1,
    }
    _, trainer, callback = trained(folder, **options)
    assert callback.handle.steps == trainer.state.global_step == 4
    assert sent_bytes(callback, trainer.model) < 0.5
    losses = [log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log]
    norms = [log["grad_norm"] for log in trainer.state.log_history if "grad_norm" in log]
    assert len(losses) == 3 and len(norms) == 4
    assert all(other == (losses, norms) for other in everywhere((losses, norms)))


def test_a_resumed_training_repeats_the_uninterrupted_one(folder: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6, "save_total_limit": 2}
    values, *_ = trained(folder / "one", **saving)
    assert {path.name for path in (folder / "one").iterdir()} == {"checkpoint-4", "checkpoint-6"}
    checkpoint = folder / "one" / "checkpoint-4"
    assert {path.name for path in checkpoint.glob("parallel_sgd_*")} == {
        f"parallel_sgd_{rank}.pth" for rank in range(RANKS)
    }
    again, _, callback = trained(folder / "two", resume=checkpoint, **saving)
    assert callback.handle.steps == 6
    assert torch.equal(again, values)

    without = psgd.torch.TrainerCallback(gradient_bits=2, residuals=None)
    zeros, *_ = trained(folder / "three", callback=without, resume=checkpoint, **saving)
    assert not torch.equal(zeros, values)


def test_a_checkpoint_that_was_moved(folder: Path, rank: int) -> None:
    """A later training has written its checkpoints over those of the first."""
    saving = {"save_strategy": "steps", "save_steps": 2}
    values, *_ = trained(folder / "one", **saving)
    if rank == 0:
        shutil.copytree(folder / "one" / "checkpoint-2", folder / "kept")
    torch.distributed.barrier()
    trained(folder / "one", **{**saving, "seed": 4})
    with pytest.raises(UserError, match=r"parallel_sgd_[01].pth, are not in .*/one/checkpoint-2"):
        trained(folder / "two", resume=folder / "kept", **saving)
    told = psgd.torch.TrainerCallback(gradient_bits=2, residuals=folder / "kept")
    again, *_ = trained(folder / "two", callback=told, resume=folder / "kept", **saving)
    assert torch.equal(again, values)


def test_resuming_on_another_number_of_ranks(folder: Path, rank: int) -> None:
    """The sum of all residuals stays the same."""
    trained(folder, save_strategy="steps", save_steps=2)
    checkpoint = folder / "checkpoint-2"
    saved = [torch.load(checkpoint / f"parallel_sgd_{k}.pth") for k in range(RANKS)]
    torch.distributed.barrier()  # all ranks have read the files
    if rank == 0:  # as if it were of three ranks
        saved.append({**saved[1], "state": {**saved[1]["state"], "rank": 2}})
        for k, file in enumerate(saved):
            file["state"]["ranks"] = 3
            torch.save(file, checkpoint / f"parallel_sgd_{k}.pth")
        path = checkpoint / "trainer_state.json"
        state = json.loads(path.read_text())
        state["stateful_callbacks"]["parallel_sgd"]["ranks"] = 3
        path.write_text(json.dumps(state))
    torch.distributed.barrier()
    expected = total([saved[k]["state"] for k in (0, 1, 1)])

    loaded = []

    class Callback(psgd.torch.TrainerCallback):
        def _load(self) -> None:
            super()._load()
            loaded.append(self.handle.state_dict())

    callback = Callback(gradient_bits=2)
    trained(folder, callback=callback, resume=checkpoint)
    found = total(everywhere(loaded[0]))
    assert expected.keys() == found.keys()
    assert all(torch.allclose(found[name], expected[name], atol=1e-6) for name in expected)
    assert max(sums.abs().max() for sums in found.values()) > 0


def test_a_second_training_continues_with_the_same_state(folder: Path) -> None:
    _, trainer, callback = trained(folder)
    handle = callback.handle
    trainer.train()
    assert callback.handle is handle and handle.steps == 8
    values_of(trainer.model)


def test_a_scaler(folder: Path) -> None:
    """Accelerate has none on the CPU, so the optimizer gets one here."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    class Callback(psgd.torch.TrainerCallback):
        def on_train_begin(self, *arguments: Any, optimizer: Any, **named: Any) -> None:
            optimizer.scaler = scaler
            super().on_train_begin(*arguments, optimizer=optimizer, **named)
            optimizer.scaler = None

    *_, callback = trained(folder, callback=Callback(gradient_bits=2))
    assert callback.handle.state_dict()["scale"] == 8.0


@pytest.mark.parametrize("kind", ["FSDP", "DEEPSPEED", "DataParallel"])
def test_what_is_refused(folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Callback(psgd.torch.TrainerCallback):
        def on_train_begin(self, args: Any, *arguments: Any, **named: Any) -> None:
            if kind == "DataParallel":
                monkeypatch.setattr(args, "_n_gpu", 2)
            name = "NO" if kind == "DataParallel" else kind
            type_of = property(lambda self: DistributedType[name])
            with monkeypatch.context() as patched:
                patched.setattr(AcceleratorState, "distributed_type", type_of, raising=False)
                super().on_train_begin(args, *arguments, **named)

    with pytest.raises(UserError, match=f"the Trainer trains by {kind}, and"):
        trained(folder, callback=Callback())


def test_an_option_that_is_unknown() -> None:
    with pytest.raises(UserError, match=r"has no option 'bits': did you mean"):
        psgd.torch.TrainerCallback(bits=4)
    with pytest.raises(UserError, match="gradient_bits=3000"):
        psgd.torch.TrainerCallback(gradient_bits=3000)


def test_a_single_process_has_nothing_to_compress(monkeypatch: pytest.MonkeyPatch) -> None:
    args, state = SimpleNamespace(world_size=1, n_gpu=1), SimpleNamespace(global_step=0)
    callback = psgd.torch.TrainerCallback(gradient_bits=4)
    alone = property(lambda self: DistributedType.NO)
    monkeypatch.setattr(AcceleratorState, "distributed_type", alone, raising=False)
    with pytest.warns(UserWarning, match="one process"):
        callback.on_train_begin(args, state, None, model=None)
    callback.on_pre_optimizer_step(args, state, None)
    callback.on_save(args, state, None)
    assert callback.handle is None
