"""Read hostfiles, in either dialect: hosts, and the number of ranks (slots) of each.

=========  ==============  ===================================
dialect    line            a host named alone
=========  ==============  ===================================
Open MPI   ``n0 slots=4``  as many slots as the host has cores
MPICH      ``n0:4``        one slot
=========  ==============  ===================================

Each mpiexec refuses, or misreads, the lines of the other dialect. A file in mpiexec's own dialect
is passed to it unchanged. Any other file (also with Windows line ends, a byte order mark, or a host
twice) is passed as a list of hosts. In that list a host named alone has one slot, because its
number of cores is unknown here.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import UserError
from ..files import content_of
from ..validation import shown

_HOST = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?")
_OPEN_MPI_OPTIONS = ("max_slots", "max-slots")
_MPICH_OPTIONS = ("binding", "ifname", "user")

MOST_RANKS = 1 << 20  #: near 2^31 some mpiexecs spin, or divide by zero

_BYTE_ORDER_MARK = "\ufeff"

OPEN_MPI, MPICH = "Open MPI", "MPICH"


@dataclass(frozen=True)
class Host:
    """A line of a hostfile.

    Attributes:
        slots: None if the line has no number of slots.
        line: the number of the line.
        dialect: the only dialect that accepts this line, or None if both do.
        option: an option without a counterpart in the other dialect.
        trailing_comment: True if a comment follows on the line.
    """

    name: str
    slots: int | None
    line: int
    dialect: str | None = None
    option: str | None = None
    trailing_comment: bool = False


@dataclass(frozen=True)
class Hostfile:
    """A valid hostfile.

    Attributes:
        plain: True if the file has no byte order mark, and no white space except blanks, tabs and
            Unix line ends. mpiexec takes a no-break space for a letter.
    """

    path: Path
    hosts: tuple[Host, ...]
    plain: bool = True

    def most_ranks_on_a_host(self, ranks: int, bare_slots: int = 1) -> int:
        """Return the number of ranks on the fullest host, if ranks are dealt by slots.

        Args:
            ranks: the number of ranks on all hosts, at least 1.
            bare_slots: the slots of a host that is named alone.
        """
        slots = self._slots(bare_slots)
        fullest, total = max(slots.values()), sum(slots.values())
        return min(ranks, fullest) if ranks <= total else -(-ranks * fullest // total)

    def total_slots(self, bare_slots: int = 1) -> int:
        """Return the number of slots of all hosts.

        Args:
            bare_slots: the slots of a host that is named alone.
        """
        return sum(self._slots(bare_slots).values())

    def without(self, names: Collection[str], bare_slots: int = 1) -> Hostfile:
        """Return the hostfile without some of its hosts, to be passed as a list.

        Args:
            names: the hosts to remove.
            bare_slots: the slots of a host that is named alone.
        """
        left = tuple(
            replace(host, slots=host.slots or bare_slots)
            for host in self.hosts
            if host.name not in names
        )
        return replace(self, hosts=left, plain=False)

    def mpiexec_options(self, dialect: str) -> list[str]:
        """Return the options that pass these hosts to an mpiexec of this dialect.

        Args:
            dialect: `OPEN_MPI` or `MPICH`.

        Raises:
            UserError: a line has an option that this dialect, or a list of hosts, cannot express.
        """
        if self._is_readable_by(dialect):
            return ["--hostfile" if dialect == OPEN_MPI else "-f", str(self.path)]
        for host in self.hosts:
            if host.option is None:
                continue
            place = f"{self.path}:{host.line}"
            if host.dialect != dialect:
                raise UserError(
                    f"{place}: hostfile option must be known to {dialect}, whose mpiexec is used "
                    f"here: {host.option!r}"
                )
            raise UserError(
                f"{place}: hostfile option needs a file that {dialect}'s mpiexec can read as it "
                "stands (lines of its dialect alone, Unix line ends, no byte order mark, each "
                f"host once, no comment after a host for MPICH): {host.option!r}"
            )
        entries = [f"{name}:{slots}" for name, slots in self._slots(1).items()]
        return ["--host" if dialect == OPEN_MPI else "-hosts", ",".join(entries)]

    def _is_readable_by(self, dialect: str) -> bool:
        """Return True if an mpiexec of this dialect accepts the file unchanged."""
        if not self.plain or len({host.name for host in self.hosts}) < len(self.hosts):
            return False
        if dialect == MPICH and any(host.trailing_comment for host in self.hosts):
            return False
        return all(host.dialect in (None, dialect) for host in self.hosts)

    def _slots(self, bare_slots: int) -> dict[str, int]:
        """Return each host's slots; those of a host listed twice are added."""
        slots: dict[str, int] = {}
        for host in self.hosts:
            slots[host.name] = slots.get(host.name, 0) + (host.slots or bare_slots)
        return slots


def read_hostfile(path: str | Path) -> Hostfile:
    """Read a hostfile of either dialect. Comments (#) and empty lines are skipped.

    Raises:
        UserError: the file is missing, has no hosts, or has a line of neither dialect; the error
            names the line.
    """
    path = Path(path)
    data = content_of(f"hostfile {str(path)!r}", path)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        raise UserError(f"hostfile must be a text file: {str(path)!r}") from None
    hosts = []
    for number, line in enumerate(text.removeprefix(_BYTE_ORDER_MARK).splitlines(), 1):
        content, comment, _ = line.partition("#")
        if content.strip():
            hosts.append(_parse_host(content, f"{path}:{number}", number, bool(comment)))
    if not hosts:
        raise UserError(f"hostfile must name at least one host: {str(path)!r} names none")
    slots = sum(host.slots or 1 for host in hosts)
    if slots > MOST_RANKS:
        raise UserError(
            f"hostfile {str(path)!r} must have at most {MOST_RANKS} slots in all: it has {slots}"
        )
    plain = not text.startswith(_BYTE_ORDER_MARK) and not any(
        char.isspace() and char not in " \t\n" for char in text
    )
    return Hostfile(path, tuple(hosts), plain)


def _parse_host(content: str, place: str, line: int, trailing_comment: bool) -> Host:
    """Parse a line without its comment."""
    first, *options = re.sub(r"\s*=\s*", "=", content).split()
    name, colon, after = first.partition(":")
    if not _HOST.fullmatch(name):
        raise UserError(f"{place}: a line must begin with a host's name: {shown(first)}")
    slots, dialect, special = None, None, None
    if colon:
        slots, dialect = _slots(after, first, place), MPICH
    for option in options:
        key, equals, value = option.partition("=")
        if key == "slots" and equals and slots is None:
            slots, belongs_to = _slots(value, option, place), OPEN_MPI
        elif key in _OPEN_MPI_OPTIONS and equals:
            _slots(value, option, place)
            special, belongs_to = option, OPEN_MPI
        elif key in _MPICH_OPTIONS and equals and value:
            special, belongs_to = option, MPICH
        else:
            belongs_to = None
        if belongs_to is None or dialect not in (None, belongs_to):
            raise UserError(
                f"{place}: a line must read `host slots=N` or `host:N`: {shown(content.strip())}"
            )
        dialect = belongs_to
    return Host(name, slots, line, dialect, special, trailing_comment)


def _slots(value: str, text: str, place: str) -> int:
    slots = decimal(value)
    if slots is None or not 1 <= slots <= MOST_RANKS:
        raise UserError(
            f"{place}: slots must be a whole number from 1 to {MOST_RANKS}: {shown(text)}"
        )
    return slots


def decimal(text: str) -> int | None:
    """Return a text as a whole number of fewer than 20 digits, or None."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else None
