"""Sources of minibatches: data sets divided among the ranks."""
