"""The options of a training run that are about checkpoints."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from ..errors import UserError
from ..validation import shown

KEEP = 3  #: checkpoints


def add_saving_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("checkpoints")
    group.add_argument(
        "--checkpoint-every",
        type=int,
        default=0,
        metavar="N",
        help="save all state whenever all ranks have seen so many more samples, where an epoch's "
        "test loss is the lowest so far, and at the end (default: 0, never)",
    )
    group.add_argument(
        "--keep",
        type=int,
        default=KEEP,
        metavar="N",
        help="how many of the latest to keep, beside the one of the lowest test loss "
        f"(default: {KEEP})",
    )
    group.add_argument(
        "--resume",
        metavar="FOLDER",
        help="go on from the newest checkpoint in the folder of a run, or from the one given. Give "
        "the other options as before; learning rate, epochs, the numbers of ranks and of servers "
        "may change. Without --output the run goes on in its own folder, where checkpoints after "
        "that one are renamed (.aside)",
    )


def resumed_run(options: argparse.Namespace) -> str | None:
    """The folder of the run that is to go on; None where there is none, or --output is given.

    Raises:
        UserError: it cannot be told. Local.
    """
    if options.resume is None or options.output:
        return None
    path = Path(options.resume)
    for folder in (path, path.parent, path.parent.parent):
        if os.path.isfile(folder / "options.json"):
            return str(folder)
    raise UserError(f"resume={shown(options.resume)} is in no run's folder: give --output too")
