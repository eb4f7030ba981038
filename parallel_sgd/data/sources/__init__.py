"""Sources: deal the samples of a data set out to the ranks in minibatches."""
