"""Compressed gradients in Hugging Face's Trainer: a callback.

The Trainer shows a callback neither its DistributedDataParallel nor the folder of the checkpoint
from which it resumes. So the callback waits for the first call of that DistributedDataParallel, and
each checkpoint's `trainer_state.json` says where the residuals are.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from ...errors import UserError
from ...exchange import ExchangeOptions
from ...options import require_options
from ...validation import shown
from ...warning import warn
from ..ddp.compress import compress
from ..ddp.state import HookState
from .packages import from_extra

with from_extra("TrainerCallback", "transformers"):
    import transformers
    from accelerate.state import AcceleratorState

KEY = "parallel_sgd"  #: in the Trainer's `stateful_callbacks`, and in names of files
IN_CHECKPOINT = "in_checkpoint"


class TrainerCallback(transformers.TrainerCallback):
    """Compress the gradients that Hugging Face's Trainer exchanges.

        trainer = Trainer(..., callbacks=[psgd.torch.TrainerCallback(gradient_bits=4)])

    Args:
        residuals: the folder with the residuals of the checkpoint to resume from, if it was moved:
            one of the names ``checkpoint-N``. "in_checkpoint": the folder in which the checkpoint
            was saved, or that has its name in the present `output_dir`. None: resume with residuals
            of zero.
        timeout_s, options: see `compress`, such as gradient_bits=4. The Trainer's own GradScaler is
            used.
    Raises:
        UserError: an option is unknown or invalid. In `Trainer.train`, also on all ranks: the
            Trainer does not train by DistributedDataParallel, or the residuals of a checkpoint are
            missing.

    Attributes:
        handle: the state of the exchange, as returned by `compress`; None before the first step.

    Each checkpoint has a file of residuals per rank, unless `save_only_model` is set. With as many
    ranks as saved, a resumed training repeats the uninterrupted one bit for bit if DDP has the same
    buckets, as with find_unused_parameters, the default for transformers' models. On another number
    of ranks the sum of all residuals stays the same. A search of hyperparameters saves no
    residuals.

    In a single process there is nothing to compress: a warning says so, and training continues.
    """

    def __init__(
        self,
        *,
        residuals: str | os.PathLike[str] | None = IN_CHECKPOINT,
        timeout_s: float | None = None,
        **options: Any,
    ) -> None:
        if not isinstance(residuals, str | os.PathLike | None):
            raise UserError(f"residuals={shown(residuals)} must be a folder, or None")
        require_options("TrainerCallback", ExchangeOptions, options)
        ExchangeOptions(**options)  # an invalid option is an error here, not in the first step
        self.handle: HookState | None = None
        self._residuals, self._timeout_s, self._options = residuals, timeout_s, options
        self._model: Any = None
        self._scaler: Any = None
        self._search: Any = None  #: the hook that waits for DDP
        self._ddp: Any = None
        self._compresses = False  #: this training has several ranks
        self._run = ""  #: a random name of the training, the same on all ranks
        self._saved: dict[str, Any] = {}  #: where the checkpoint's residuals are

    def on_train_begin(
        self,
        args: Any,
        state: Any,
        control: Any,
        model: Any = None,
        optimizer: Any = None,
        **_: Any,
    ) -> None:
        """Wait for DDP's first call. The Trainer calls this. Collective."""
        self._end_search()
        kind = AcceleratorState().distributed_type.value
        if kind == "NO" and args.n_gpu > 1:
            kind = "DataParallel"
        if kind != "NO" and not kind.startswith("MULTI_"):
            raise UserError(
                f"TrainerCallback: the Trainer trains by {kind}, and compressed gradients need "
                "DistributedDataParallel: start one process per device (torchrun), without "
                "DeepSpeed and FSDP"
            )
        self._compresses = args.world_size > 1
        if not self._compresses:
            warn("TrainerCallback: there is only one process, so no gradients to compress")
            return
        self._model, self._scaler = model, getattr(optimizer, "scaler", None)
        self._saved = self._folders(args, state) if state.global_step else {}
        self._state, self._rank, self._ranks = state, args.process_index, args.world_size
        self._output = os.path.abspath(args.output_dir)
        self._search = register_module_forward_pre_hook(self._seen)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Check that DDP was called. The Trainer calls this. Local."""
        if self._compresses and self._search is not None:
            self._end_search()
            raise UserError(
                "TrainerCallback: no DistributedDataParallel of the Trainer's model was called in "
                "this step, so its gradients were not compressed"
            )

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Save this rank's residuals beside the Trainer's own files. The Trainer calls this.
        Local.
        """
        if self.handle is None or args.save_only_model or state.is_hyper_param_search:
            return
        folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
        folder.mkdir(parents=True, exist_ok=True)
        path = _file(folder, args.process_index)
        torch.save({"run": self._run, "state": self.handle.state_dict()}, f"{path}.new")
        os.replace(f"{path}.new", path)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Forget the model. The Trainer calls this. Local."""
        self._end_search()

    def _seen(self, module: torch.nn.Module, _: Any) -> None:
        """Compress the gradients of DDP, before its first forward pass."""
        ddp = getattr(module, "_orig_mod", module)  # torch.compile's
        if not isinstance(ddp, DistributedDataParallel):
            return
        if all(part is not self._model for part in ddp.modules()):
            return
        self._end_search()
        if ddp is not self._ddp:
            if self.handle is not None:
                self.handle.close()
            self.handle = compress(
                ddp, scaler=self._scaler, timeout_s=self._timeout_s, **self._options
            )
            self._ddp = ddp
        assert self.handle is not None
        comm = self.handle.comm
        self._run = comm.allgather_object(secrets.token_hex(8))[0]
        if self._saved:
            self._load()
        self._state.stateful_callbacks[KEY] = {
            "run": self._run,
            "ranks": self._ranks,
            "output_dir": self._output,
        }

    def _end_search(self) -> None:
        if self._search is not None:
            self._search.remove()
            self._search = None

    def _folders(self, args: Any, state: Any) -> dict[str, Any]:
        """Return where the residuals of the checkpoint may be; empty: begin with zeros."""
        saved = (state.stateful_callbacks or {}).get(KEY)
        if self._residuals is None:
            return {}
        if saved is None:
            if args.process_index == 0:
                warn("TrainerCallback: the checkpoint has no residuals, so they begin with zeros")
            return {}
        name = f"checkpoint-{state.global_step}"
        folders = [str(self._residuals)]
        if self._residuals == IN_CHECKPOINT:
            folders = [os.path.join(saved["output_dir"], name), os.path.join(args.output_dir, name)]
            if args.resume_from_checkpoint:
                folders.append(str(args.resume_from_checkpoint))
        return {**saved, "folders": list(dict.fromkeys(map(os.path.abspath, folders)))}

    def _load(self) -> None:
        """Load the residuals of the checkpoint. Collective."""
        assert self.handle is not None
        ranks, comm = self._saved["ranks"], self.handle.comm
        if ranks == self._ranks:
            self.handle.load_state_dict(comm.together(lambda: self._read(self._rank)))
        else:  # read by load_state_dict, one at a time
            self.handle.load_state_dict(self._read(rank) for rank in range(ranks))

    def _read(self, rank: int) -> Any:
        for folder in self._saved["folders"]:
            path = _file(folder, rank)
            if path.is_file():
                found = torch.load(path, map_location="cpu", weights_only=True)
                if found["run"] == self._saved["run"]:
                    return found["state"]
        raise UserError(
            f"TrainerCallback: the checkpoint's residuals of rank {rank}, {_file('', rank)}, are "
            f"not in {' or '.join(self._saved['folders'])}: give residuals=FOLDER, or "
            "residuals=None to begin with zeros"
        )


def _file(folder: str | Path, rank: int) -> Path:
    return Path(folder, f"{KEY}_{rank}.pth")
