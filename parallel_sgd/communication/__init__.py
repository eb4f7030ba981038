"""Ranks and their collectives: over MPI, over threads of a process, or a single rank.

Public names based on NumPy are imported on first use, since a launcher needs no NumPy.
"""

from typing import TYPE_CHECKING

from ..errors import RankFailed, RanksChanged
from ..lazy import on_first_use
from ..runtime import SimulatedFailure
from .background import InBackground, ProgramEnds, program_ends  # exit handlers: before the user's
from .elastic.retry import can_recover, reconfigure_ranks, retry
from .job_environment import (
    FOLDER,
    GPUS_PER_RANK,
    INTERFACE,
    JOB,
    LOG_DIR,
    RANK_PROCESS,
    RESTART,
    SERVERS,
    SURVIVE,
    WAIT_TIMEOUT_S,
    launched_local_rank,
    launched_rank,
    launched_size,
    requested_servers,
    without_launcher,
)
from .phrases import CHECKSUM, in_brief
from .timeouts import TIMEOUT_S, checked_timeout, default_timeout

if TYPE_CHECKING:
    from .agreement import FINGERPRINT_FACTOR, FINGERPRINT_PRIME
    from .clocks import ClockReading, compare_clocks, rank_0_time
    from .cuda.nccl import Nccl
    from .elastic.simulated import simulate_recovery
    from .endpoint import HEADER_LENGTH, Endpoint, OtherLength
    from .entry_point import abort_on_error
    from .liveness.abort import install_excepthook_if_launched, print_labelled, user_message
    from .liveness.heartbeat import Heartbeat, HeartbeatTable, RankState, make_heartbeat_table
    from .liveness.preemption import chosen_signals, listen, preemption_requested, requeue
    from .liveness.rank_status import Status, report_start, report_status
    from .liveness.watchdog import Watchdog
    from .messages import PIECE_BYTES, PIECE_VALUES
    from .mpi.init_timeout import kill_if_longer_than
    from .network_interfaces import interfaces
    from .roles import WHOLE_MINIBATCH, AllRanks, AllTrain, Group, Roles
    from .serialization import packed, unpacked
    from .subset import Subset
    from .threads.communicator import ThreadCommunicator, ThreadWorld, simulate
    from .threads.endpoint import Mailbox
    from .world import Communicator

__all__ = [
    "CHECKSUM",
    "FINGERPRINT_FACTOR",
    "FINGERPRINT_PRIME",
    "FOLDER",
    "GPUS_PER_RANK",
    "HEADER_LENGTH",
    "INTERFACE",
    "JOB",
    "LOG_DIR",
    "PIECE_BYTES",
    "PIECE_VALUES",
    "RANK_PROCESS",
    "RESTART",
    "SERVERS",
    "SURVIVE",
    "TIMEOUT_S",
    "WAIT_TIMEOUT_S",
    "WHOLE_MINIBATCH",
    "AllRanks",
    "AllTrain",
    "ClockReading",
    "Communicator",
    "Endpoint",
    "Group",
    "Heartbeat",
    "HeartbeatTable",
    "InBackground",
    "Mailbox",
    "Nccl",
    "OtherLength",
    "ProgramEnds",
    "RankFailed",
    "RankState",
    "RanksChanged",
    "Roles",
    "SimulatedFailure",
    "Status",
    "Subset",
    "ThreadCommunicator",
    "ThreadWorld",
    "Watchdog",
    "abort_on_error",
    "can_recover",
    "checked_timeout",
    "chosen_signals",
    "compare_clocks",
    "default_timeout",
    "in_brief",
    "install_excepthook_if_launched",
    "interfaces",
    "kill_if_longer_than",
    "launched_local_rank",
    "launched_rank",
    "launched_size",
    "listen",
    "make_heartbeat_table",
    "packed",
    "preemption_requested",
    "print_labelled",
    "program_ends",
    "rank_0_time",
    "reconfigure_ranks",
    "report_start",
    "report_status",
    "requested_servers",
    "requeue",
    "retry",
    "simulate",
    "simulate_recovery",
    "unpacked",
    "user_message",
    "without_launcher",
]

__getattr__, __dir__ = on_first_use(
    __name__,
    {
        "clocks": ("ClockReading", "compare_clocks", "rank_0_time"),
        "agreement": ("FINGERPRINT_FACTOR", "FINGERPRINT_PRIME"),
        "elastic.simulated": ("simulate_recovery",),
        "endpoint": ("HEADER_LENGTH", "Endpoint", "OtherLength"),
        "entry_point": ("abort_on_error",),
        "liveness.abort": ("install_excepthook_if_launched", "print_labelled", "user_message"),
        "liveness.heartbeat": ("Heartbeat", "HeartbeatTable", "RankState", "make_heartbeat_table"),
        "liveness.preemption": ("chosen_signals", "listen", "preemption_requested", "requeue"),
        "liveness.rank_status": ("Status", "report_start", "report_status"),
        "liveness.watchdog": ("Watchdog",),
        "messages": ("PIECE_BYTES", "PIECE_VALUES"),
        "mpi.init_timeout": ("kill_if_longer_than",),
        "cuda.nccl": ("Nccl",),
        "network_interfaces": ("interfaces",),
        "subset": ("Subset",),
        "roles": ("WHOLE_MINIBATCH", "AllRanks", "AllTrain", "Group", "Roles"),
        "serialization": ("packed", "unpacked"),
        "threads.communicator": ("ThreadCommunicator", "ThreadWorld", "simulate"),
        "threads.endpoint": ("Mailbox",),
        "world": ("Communicator",),  # sets the functions that make a world
    },
)
