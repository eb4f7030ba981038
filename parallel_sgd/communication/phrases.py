"""Error texts about ranks waiting for each other without success."""

from __future__ import annotations

from collections.abc import Sequence

CHECKSUM = "checksum"
"""Last word in the name of a checksum of memory required to be equal on all ranks. A difference is
an error of the program or the machine, never of a user's arguments."""


def in_words(ranks: Sequence[int]) -> str:
    """Format ranks as "rank 3" or "ranks 0, 1, 2"."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def in_brief(ranks: Sequence[int]) -> str:
    """Format ascending ranks as "rank 3" or "ranks 0 to 3, 5, 6", shortening runs."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(parts)


def different_values(name: str, values: Sequence[str], ranks: Sequence[int]) -> str | None:
    """Describe different values on ranks, or return None if all are equal.

    Args:
        name: name of the value.
        values: value of every rank, in rank order.
        ranks: numbers of the ranks for the text.
    """
    if len(set(values)) <= 1:
        return None
    ranks_by_value = {
        value: [k for k, v in zip(ranks, values, strict=True) if v == value] for value in values
    }
    text = "; ".join(f"{in_words(group)}: {value}" for value, group in ranks_by_value.items())
    differs = f"{name} must be the same on all ranks, but differs: {text}"
    if not name.endswith(CHECKSUM):
        return differs
    return f"{differs}; {odd_one_out(list(ranks_by_value.values()))}"


def odd_one_out(groups: Sequence[Sequence[int]]) -> str:
    """Name the ranks with wrong values, given ranks grouped by equal values.

    Args:
        groups: ranks with equal values.
    """
    largest, ranks = max(groups, key=len), sum(map(len, groups))
    if 2 * len(largest) <= ranks:
        return f"the wrong ranks are unknown: more than half of the {ranks} ranks must be equal"
    different = sorted(rank for group in groups if group is not largest for rank in group)
    differ = "differs" if len(different) == 1 else "differ"
    return (
        f"{in_words(different)} {differ} from the other ranks: the program has changed it there, "
        "or a bit of memory has flipped"
    )


def waiting_for_finished(finished: Sequence[int], waits: str) -> str:
    """Describe a wait for finished ranks.

    Args:
        finished: the finished ranks.
        waits: the waiting rank and the name of its wait.
    """
    have = "has" if len(finished) == 1 else "have"
    return (
        f"{waits} for {in_words(finished)}, which {have} finished (the program has ended there): "
        "every rank must take every step, and call learner.finish(), or use DDP's join()"
    )


def different_calls(called: Sequence[str], ranks: Sequence[int]) -> str | None:
    """Describe different collectives called by ranks, or return None if all are equal.

    Args:
        called: collective called by every rank, in rank order.
        ranks: numbers of the ranks for the text.
    """
    if len(set(called)) == 1:
        return None
    ranks_by_value = {
        value: [k for k, c in zip(ranks, called, strict=True) if c == value] for value in called
    }
    calls = "; ".join(f"{in_words(group)}: {value}" for value, group in ranks_by_value.items())
    return f"the ranks have called different collectives, and would wait for each other: {calls}"
