"""The command line: `parallel-sgd run`, `train` and `info`."""
