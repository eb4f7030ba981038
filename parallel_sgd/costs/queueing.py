"""Throughput of workers with common servers: a closed network of queues."""

from __future__ import annotations

from collections.abc import Sequence

MOST_CUSTOMERS = 4096  #: above, the bound of many customers is exact enough


def closed_throughput(customers: int, demands_s: Sequence[float], think_s: float) -> float:
    """Return the visits a second to stations shared by a fixed number of customers. Local.

    Each customer works by itself for a while, visits every station once, and begins again. A
    station serves all its visitors at once, each the slower the more there are, as a link does.
    With one customer the result is 1 / (think_s + sum of demands); with many, 1 / largest demand.

    Args:
        customers: their number, at least 1.
        demands_s: seconds of a visit to each station, for a customer alone.
        think_s: seconds of a customer's own work.

    Source: exact mean value analysis; Reiser, Lavenberg, "Mean-Value Analysis of Closed Multichain
    Queuing Networks", J. ACM 27 (2), 1980.
    """
    if customers > MOST_CUSTOMERS:
        busiest_s = max(*demands_s, (think_s + sum(demands_s)) / customers)
        return 1 / busiest_s
    waiting, throughput = [0.0] * len(demands_s), 0.0
    for present in range(1, customers + 1):
        visits_s = [s * (1 + n) for s, n in zip(demands_s, waiting, strict=True)]
        throughput = present / (think_s + sum(visits_s))
        waiting = [throughput * s for s in visits_s]
    return throughput
