"""Sum gradients over all ranks: a compressed reduce-scatter and all-gather with error feedback."""

from .exchange import TRANSPORTS, Exchange
from .layout import Bucket, Topology, cut_buckets, topology_for
from .nccl import start_nccl
from .options import ExchangeOptions, TransportOptions
from .overlap import OverlappedExchange
from .plan import ExchangePlan, choose_bits, choose_plan
from .projections import Projections
from .residuals import Residuals

__all__ = [
    "TRANSPORTS",
    "Bucket",
    "Exchange",
    "ExchangeOptions",
    "ExchangePlan",
    "OverlappedExchange",
    "Projections",
    "Residuals",
    "Topology",
    "TransportOptions",
    "choose_bits",
    "choose_plan",
    "cut_buckets",
    "start_nccl",
    "topology_for",
]
