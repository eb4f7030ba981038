"""The version of the library, which all ranks of a run must share."""

__version__ = "0.1.0"
