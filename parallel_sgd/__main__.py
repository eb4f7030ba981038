"""Entry point for `python -m parallel_sgd`: the same as `parallel-sgd`."""

import sys

from .command_line.main import main

if __name__ == "__main__":
    sys.exit(main())
