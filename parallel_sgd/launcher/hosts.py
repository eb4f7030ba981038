"""Hostfiles: which hosts, and how many ranks (slots) on each, in either dialect.

=========  ==============  ===================================
dialect    line            a host named alone
=========  ==============  ===================================
Open MPI   ``n0 slots=4``  as many slots as the host has cores
MPICH      ``n0:4``        one slot
=========  ==============  ===================================

Each mpiexec refuses, or misreads, the other's lines. A file that mpiexec understands is handed to
it as it stands; any other (also one with Windows line ends, a byte order mark, or a host twice) is
handed over as a list of hosts, in which a host named alone has one slot, since nobody here knows
its cores.
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

MOST_RANKS = 1 << 20  #: some mpiexecs spin, or divide by zero, near 2^31

_BYTE_ORDER_MARK = "\ufeff"

OPEN_MPI, MPICH = "Open MPI", "MPICH"


@dataclass(frozen=True)
class Host:
    """One line: a host's name, its slots (None if none are named), and where it stands.

    `dialect` is the one dialect that takes this line, or None where both do.
    `option` is an option that has no counterpart in the other dialect.
    """

    name: str
    slots: int | None
    line: int
    dialect: str | None = None
    option: str | None = None
    trailing_comment: bool = False


@dataclass(frozen=True)
class Hostfile:
    """A hostfile that has been read and found sound.

    `plain`: its bytes have no byte order mark, and of white space none but blanks, tabs and Unix
    line ends: mpiexec takes a no-break space for a letter.
    """

    path: Path
    hosts: tuple[Host, ...]
    plain: bool = True

    def most_ranks_on_a_host(self, ranks: int, bare_slots: int = 1) -> int:
        """Of so many ranks, dealt by slots, how many the fullest host gets.

        Args:
            ranks: at least 1.
            bare_slots: the slots of a host that is named alone.
        """
        slots = self._slots(bare_slots)
        fullest, total = max(slots.values()), sum(slots.values())
        return min(ranks, fullest) if ranks <= total else -(-ranks * fullest // total)

    def room(self, bare_slots: int = 1) -> int:
        """The slots of all hosts.

        Args:
            bare_slots: the slots of a host that is named alone.
        """
        return sum(self._slots(bare_slots).values())

    def without(self, names: Collection[str], bare_slots: int = 1) -> Hostfile:
        """The same without some of its hosts, as a list.

        Args:
            names: of those.
            bare_slots: the slots of a host that is named alone.
        """
        left = tuple(
            replace(host, slots=host.slots or bare_slots)
            for host in self.hosts
            if host.name not in names
        )
        return replace(self, hosts=left, plain=False)

    def mpiexec_options(self, dialect: str) -> list[str]:
        """The options that give these hosts to an mpiexec of this dialect.

        Args:
            dialect: `OPEN_MPI` or `MPICH`.

        Raises:
            UserError: a line has an option that this dialect, or a list of hosts, cannot express.
        """
        if self._is_in(dialect):
            return ["--hostfile" if dialect == OPEN_MPI else "-f", str(self.path)]
        for host in self.hosts:
            if host.option is None:
                continue
            where = f"{self.path}:{host.line}"
            if host.dialect != dialect:
                raise UserError(
                    f"{where}: hostfile option must be known to {dialect}, whose mpiexec is used "
                    f"here: {host.option!r}"
                )
            raise UserError(
                f"{where}: hostfile option needs a file that {dialect}'s mpiexec can read as it "
                "stands (lines of its dialect alone, Unix line ends, no byte order mark, each host "
                f"once, no comment behind a host for MPICH): {host.option!r}"
            )
        entries = [f"{name}:{slots}" for name, slots in self._slots(1).items()]
        return ["--host" if dialect == OPEN_MPI else "-hosts", ",".join(entries)]

    def _is_in(self, dialect: str) -> bool:
        """Whether an mpiexec of this dialect takes the file as it stands."""
        if not self.plain or len({host.name for host in self.hosts}) < len(self.hosts):
            return False
        if dialect == MPICH and any(host.trailing_comment for host in self.hosts):
            return False
        return all(host.dialect in (None, dialect) for host in self.hosts)

    def _slots(self, bare_slots: int) -> dict[str, int]:
        """Each host's slots, those of a host that is listed twice added up."""
        slots: dict[str, int] = {}
        for host in self.hosts:
            slots[host.name] = slots.get(host.name, 0) + (host.slots or bare_slots)
        return slots


def read_hostfile(path: str | Path) -> Hostfile:
    """Read a hostfile of either dialect; comments (#) and empty lines are skipped.

    Raises:
        UserError: no such file, no hosts in it, or a line that neither dialect has; names the line.
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
            hosts.append(_host(content, f"{path}:{number}", number, bool(comment)))
    if not hosts:
        raise UserError(f"hostfile must name at least one host: {str(path)!r} names none")
    slots = sum(host.slots or 1 for host in hosts)
    if slots > MOST_RANKS:
        raise UserError(
            f"hostfile {str(path)!r} must have at most {MOST_RANKS} slots in all: it has {slots}"
        )
    plain = not text.startswith(_BYTE_ORDER_MARK) and not any(
        one.isspace() and one not in " \t\n" for one in text
    )
    return Hostfile(path, tuple(hosts), plain)


def _host(content: str, where: str, line: int, trailing_comment: bool) -> Host:
    """One line without its comment."""
    first, *options = re.sub(r"\s*=\s*", "=", content).split()
    name, colon, after = first.partition(":")
    if not _HOST.fullmatch(name):
        raise UserError(f"{where}: a line must begin with a host's name: {shown(first)}")
    slots, dialect, special = None, None, None
    if colon:
        slots, dialect = _slots(after, first, where), MPICH
    for option in options:
        key, equals, value = option.partition("=")
        if key == "slots" and equals and slots is None:
            slots, belongs_to = _slots(value, option, where), OPEN_MPI
        elif key in _OPEN_MPI_OPTIONS and equals:
            _slots(value, option, where)
            special, belongs_to = option, OPEN_MPI
        elif key in _MPICH_OPTIONS and equals and value:
            special, belongs_to = option, MPICH
        else:
            belongs_to = None
        if belongs_to is None or dialect not in (None, belongs_to):
            raise UserError(
                f"{where}: a line must read `host slots=N` or `host:N`: {shown(content.strip())}"
            )
        dialect = belongs_to
    return Host(name, slots, line, dialect, special, trailing_comment)


def _slots(value: str, text: str, where: str) -> int:
    slots = decimal(value)
    if slots is None or not 1 <= slots <= MOST_RANKS:
        raise UserError(
            f"{where}: slots must be a whole number from 1 to {MOST_RANKS}: {shown(text)}"
        )
    return slots


def decimal(text: str) -> int | None:
    """A whole number of not too many digits, or None."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else None
