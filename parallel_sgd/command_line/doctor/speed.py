"""Find slow hosts and slow links: all remaining ranks wait for these."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from .checks import Finding, Level, ok
from .facts import Facts
from .network import Pair

SLOWER, MUCH_SLOWER = 1.5, 2.5  #: factors below the median: a warning, a problem
LATENCY, LATENCY_S = 3.0, 2e-4  #: warn above both this factor and this excess over the median


def hosts(facts: Sequence[Facts]) -> list[Finding]:
    """Compare each host's memory and arithmetic speed with the median."""
    measured = [fact for fact in facts if fact.axpy > 0]
    what = {"axpy": ("memory", 1e9, "GB/s"), "product": ("matrix products", 1e9, "GFLOP/s")}
    found, said = [], []
    for name, (label, unit, symbol) in what.items():
        typical = median(getattr(fact, name) for fact in measured)
        said.append(f"{label} {typical / unit:.1f} {symbol}")
        for fact in measured:
            speed = getattr(fact, name)
            level = _level(typical, speed)
            if level != "ok":
                found.append(
                    Finding(
                        "hosts",
                        level,
                        f"{fact.host} is slow: {label} {speed / unit:.1f} {symbol}, the median has "
                        f"{typical / unit:.1f}",
                        "look for other programs (top), heat (dmesg), a power-saving governor; or "
                        "run without this host",
                    )
                )
    return found or ok("hosts", f"{', '.join(said)} on the median host")


def links(pairs: Sequence[Pair]) -> list[Finding]:
    """Compare each host's link with the median, and each path between hosts with their links.

    Each direction is judged by itself. A host's rates of sending and receiving are those with its
    best partner, so a host with a slow link does not make its partners look slow.
    """
    if not pairs:
        return ok("links", "one host: there are none")
    ways = [(*pair.hosts, pair.bytes_per_s[0]) for pair in pairs]
    ways += [(*pair.hosts[::-1], pair.bytes_per_s[1]) for pair in pairs]
    names = sorted({host for pair in pairs for host in pair.hosts})
    sends = {name: max(rate for source, _, rate in ways if source == name) for name in names}
    receives = {name: max(rate for _, target, rate in ways if target == name) for name in names}
    found = []
    if len(names) > 2:
        typical = median([*sends.values(), *receives.values()])
        for does, rates in (("sends", sends), ("receives", receives)):
            found += [_slow_host(name, does, rate, typical) for name, rate in rates.items()]
    else:  # with two hosts the slow one is unknown
        typical = max(rate for *_, rate in ways)
        sends = receives = dict.fromkeys(names, typical)
    for source, target, rate in ways:
        found.append(_slow_way(source, target, rate, min(sends[source], receives[target], typical)))
    typical_s = median(pair.latency_s for pair in pairs)
    for pair in pairs:
        if pair.latency_s > max(LATENCY * typical_s, typical_s + LATENCY_S):
            first, second = pair.hosts
            says = (
                f"between {first} and {second}: {pair.latency_s * 1e6:,.0f} us one way, the median "
            )
            advice = "look for a longer way (traceroute), or a busy host"
            found.append(Finding("links", "warning", f"{says}has {typical_s * 1e6:,.0f}", advice))
    return [finding for finding in found if finding.level != "ok"] or ok(
        "links",
        f"{typical / 1e6:,.0f} MB/s and {typical_s * 1e6:,.0f} us, median of {len(pairs)} "
        f"pair{'s' * (len(pairs) > 1)} of hosts",
    )


def _slow_host(name: str, does: str, rate: float, typical: float) -> Finding:
    return Finding(
        "links",
        _level(typical, rate),
        f"{name} {does} slowly: {rate / 1e6:,.0f} MB/s, the median has {typical / 1e6:,.0f}",
        "look at its cable, port and driver (ethtool, tc), and at the switch; or run without this "
        "host",
    )


def _slow_way(source: str, target: str, rate: float, expected: float) -> Finding:
    return Finding(
        "links",
        _level(expected, rate),
        f"from {source} to {target} the rate is {rate / 1e6:,.0f} MB/s, and {expected / 1e6:,.0f} "
        "could be",
        "look at the path between these hosts: a switch, a cable to it, a full trunk, a limit (tc)",
    )


def _level(typical: float, speed: float) -> Level:
    if speed * MUCH_SLOWER < typical:
        return "problem"
    return "warning" if speed * SLOWER < typical else "ok"
