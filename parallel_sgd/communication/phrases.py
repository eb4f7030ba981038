"""What errors say of ranks that wait for each other in vain."""

from __future__ import annotations

from collections.abc import Sequence

CHECKSUM = "checksum"
"""What is last in the name of a number that the ranks have of what must be equal in their memory:
where it differs, no user has asked for it."""


def in_words(ranks: Sequence[int]) -> str:
    """ "rank 3", or "ranks 0, 1, 2" """
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def in_brief(ranks: Sequence[int]) -> str:
    """ "rank 3", or "ranks 0 to 3, 5, 6": in ascending order, with three or more in a row as two"""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(parts)


def different_values(name: str, values: Sequence[str], ranks: Sequence[int]) -> str | None:
    """That ranks have different values of what must be the same; None where they have not.

    Args:
        name: of what it is.
        values: of every rank, in their order.
        ranks: what to call them.
    """
    if len(set(values)) <= 1:
        return None
    who = {one: [k for k, v in zip(ranks, values, strict=True) if v == one] for one in values}
    has = "; ".join(f"{in_words(some)}: {one}" for one, some in who.items())
    differs = f"{name} must be the same on all ranks, but differs: {has}"
    if not name.endswith(CHECKSUM):
        return differs
    return f"{differs}; {odd_one_out(list(who.values()))}"


def odd_one_out(groups: Sequence[Sequence[int]]) -> str:
    """Of ranks that hold different values of what must be equal, which are wrong.

    Args:
        groups: ranks with equal values.
    """
    largest, ranks = max(groups, key=len), sum(map(len, groups))
    if 2 * len(largest) <= ranks:
        return f"nobody can tell who is wrong: more than half of the {ranks} ranks must be alike"
    odd = sorted(rank for group in groups if group is not largest for rank in group)
    differ = "differs" if len(odd) == 1 else "differ"
    return (
        f"{in_words(odd)} {differ} from the others: the program has changed it there, or a bit "
        "of memory has flipped"
    )


def waiting_for_finished(gone: Sequence[int], waits: str) -> str:
    """That ranks have left, of which one is waited for; `waits`: who waits in what."""
    have = "has" if len(gone) == 1 else "have"
    return (
        f"{waits} for {in_words(gone)}, which {have} left (the program has ended there): every "
        "rank must take every step, and call learner.finish()"
    )


def different_calls(called: Sequence[str], ranks: Sequence[int]) -> str | None:
    """That ranks have called different collectives; None where they have not.

    Args:
        called: by every rank, in their order.
        ranks: what to call them.
    """
    if len(set(called)) == 1:
        return None
    who = {one: [k for k, c in zip(ranks, called, strict=True) if c == one] for one in called}
    calls = "; ".join(f"{in_words(some)}: {one}" for one, some in who.items())
    return f"the ranks have called different things, and would wait for each other: {calls}"
