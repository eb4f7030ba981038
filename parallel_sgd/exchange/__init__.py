"""Sums over all ranks: in full precision, or compressed in two stages with error feedback."""

from .exchange import Exchange, Residuals
from .full_precision import FullPrecisionExchange
from .two_stage import TwoStageExchange, require_float32

__all__ = ["Exchange", "FullPrecisionExchange", "Residuals", "TwoStageExchange", "require_float32"]
