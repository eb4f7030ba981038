"""Sums over all ranks: in full precision, or compressed in two stages with error feedback."""

from .exchange import TRANSPORTS, Exchange, require_float32
from .options import ExchangeOptions
from .pieces import Bucket, cut_buckets
from .residuals import Residuals
from .routes import Routes, routes_for
from .state import ExchangeState
from .ways import Measured, Way, choose_bits, choose_way

__all__ = [
    "TRANSPORTS",
    "Bucket",
    "Exchange",
    "ExchangeOptions",
    "ExchangeState",
    "Measured",
    "Residuals",
    "Routes",
    "Way",
    "choose_bits",
    "choose_way",
    "cut_buckets",
    "require_float32",
    "routes_for",
]
