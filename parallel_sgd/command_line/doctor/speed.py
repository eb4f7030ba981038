"""Slow hosts and slow links: those that all the others wait for."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from .facts import Facts
from .finding import Finding, Level, ok
from .network import Pair

SLOWER, MUCH_SLOWER = 1.5, 2.5  #: times as slow as the median: a warning, a problem
LATENCY, LATENCY_S = 3.0, 2e-4  #: times the median's latency, and by so much


def hosts(facts: Sequence[Facts]) -> list[Finding]:
    """Each host's memory and arithmetic beside the median of all."""
    measured = [one for one in facts if one.axpy > 0]
    what = {"axpy": ("memory", 1e9, "GB/s"), "product": ("matrix products", 1e9, "GFLOP/s")}
    found, said = [], []
    for name, (label, unit, symbol) in what.items():
        usual = median(getattr(one, name) for one in measured)
        said.append(f"{label} {usual / unit:.1f} {symbol}")
        for one in measured:
            speed = getattr(one, name)
            level = _level(usual, speed)
            if level != "ok":
                found.append(
                    Finding(
                        "hosts",
                        level,
                        f"{one.host} is slow: {label} {speed / unit:.1f} {symbol}, the median has "
                        f"{usual / unit:.1f}",
                        "look for other programs (top), heat (dmesg), a power-saving governor; or "
                        "leave it out",
                    )
                )
    return found or ok("hosts", f"{', '.join(said)} on the median host")


def links(pairs: Sequence[Pair]) -> list[Finding]:
    """Each host's link beside the median of all, each way by itself, and each way between two hosts
    beside their links.

    A host sends, and receives, as fast as it does with its best partner: so one whose link is slow
    does not make others look so.
    """
    if not pairs:
        return ok("links", "one host: there are none")
    ways = [(*pair.hosts, pair.bytes_per_s[0]) for pair in pairs]
    ways += [(*pair.hosts[::-1], pair.bytes_per_s[1]) for pair in pairs]
    names = sorted({host for pair in pairs for host in pair.hosts})
    sends = {name: max(rate for one, _, rate in ways if one == name) for name in names}
    receives = {name: max(rate for _, other, rate in ways if other == name) for name in names}
    found = []
    if len(names) > 2:
        usual = median([*sends.values(), *receives.values()])
        for does, rates in (("sends", sends), ("receives", receives)):
            found += [_slow_host(name, does, rate, usual) for name, rate in rates.items()]
    else:  # nobody can tell which of two it is
        usual = max(rate for *_, rate in ways)
        sends = receives = dict.fromkeys(names, usual)
    for one, other, rate in ways:
        found.append(_slow_way(one, other, rate, min(sends[one], receives[other], usual)))
    few = median(pair.latency_s for pair in pairs)
    for pair in pairs:
        if pair.latency_s > max(LATENCY * few, few + LATENCY_S):
            one, other = pair.hosts
            says = f"between {one} and {other}: {pair.latency_s * 1e6:,.0f} us one way, the median "
            advice = "look for a longer way (traceroute), or a busy host"
            found.append(Finding("links", "warning", f"{says}has {few * 1e6:,.0f}", advice))
    return [one for one in found if one.level != "ok"] or ok(
        "links",
        f"{usual / 1e6:,.0f} MB/s and {few * 1e6:,.0f} us, median of {len(pairs)} "
        f"pair{'s' * (len(pairs) > 1)} of hosts",
    )


def _slow_host(name: str, does: str, rate: float, usual: float) -> Finding:
    return Finding(
        "links",
        _level(usual, rate),
        f"{name} {does} slowly: {rate / 1e6:,.0f} MB/s, the median has {usual / 1e6:,.0f}",
        "look at its cable, port and driver (ethtool, tc), and at the switch; or leave it out",
    )


def _slow_way(one: str, other: str, rate: float, expected: float) -> Finding:
    return Finding(
        "links",
        _level(expected, rate),
        f"from {one} to {other} it is {rate / 1e6:,.0f} MB/s, and {expected / 1e6:,.0f} could be",
        "look at the way between them: a switch, a cable to it, a full trunk, a limit (tc)",
    )


def _level(usual: float, speed: float) -> Level:
    if speed * MUCH_SLOWER < usual:
        return "problem"
    return "warning" if speed * SLOWER < usual else "ok"
