"""The benchmark of faults at random moments."""
