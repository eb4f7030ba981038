"""Sums over all ranks: inside one machine, and over emulated links.

Inside one machine (`-n K`): seconds against MPI_Allreduce of the same vector in the same ranks, and
bytes against the theory.
Over links (`--hosts K`; as root, nothing else then): 1, 10 and 100 MB of float32 on K hosts with a
rank each, by MPI_Allreduce, by gloo's all_reduce (if PyTorch is installed) and by our exchange, in
turn, against the links' limit: 2 (K-1)/K n (b/8 + levels) bytes at the payload's rate. Goals:
at 100 MB in 1 bit 20 times as fast as gloo in 32; from 10 MB on in 32 bit 1.1 times that limit.
"""

from __future__ import annotations

import argparse

from parallel_sgd import UserError
from parallel_sgd.command_line.units import bits_per_s, count

from ..report import Report, positive
from . import links, one_machine

RANKS, VALUES, ROUNDS = 2, 1 << 24, 9  #: inside one machine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("-n", "--ranks", type=positive, metavar="K", help=f"in one machine (default: {RANKS})")
    add("--hosts", type=positive, metavar="K", help="over emulated links instead")
    add("--rate", type=bits_per_s, metavar="R", help="of each link (default: 1gbit)")
    sizes = ", ".join(f"{values:,}" for values in links.SIZES)
    add(
        "--values",
        type=count,
        nargs="+",
        metavar="N",
        help=f"in the vector, 25M or 1024 (default: 2**24; over links {sizes})",
    )
    default = f"(default: {ROUNDS}; over links {links.ROUNDS})"
    add("--rounds", type=positive, help=f"of all sums {default}")


def main(options: argparse.Namespace) -> Report:
    if options.hosts is None:
        if options.rate is not None:
            raise UserError(f"rate={options.rate:g} bit/s needs --hosts: how many")
        values = options.values or [VALUES]
        if len(values) > 1:
            raise UserError(f"values={values} must be one number without --hosts")
        return one_machine.compared(options.ranks or RANKS, values[0], options.rounds or ROUNDS)
    if options.ranks is not None:
        raise UserError(f"ranks={options.ranks} must not be given with --hosts: one on each")
    if options.hosts < 2:
        raise UserError(f"hosts={options.hosts} must be at least 2: alone nobody communicates")
    return links.compared(
        options.hosts,
        links.RATE if options.rate is None else options.rate,
        options.values or list(links.SIZES),
        options.rounds or links.ROUNDS,
    )
