"""The training session: the loop over minibatches, evaluation, checkpoints and the run folder."""
