"""Bounded waits: each wait for another rank ends, with a reason."""
