"""The studies of convergence: the test loss on K logical ranks, paired by seed."""
