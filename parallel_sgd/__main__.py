"""`python -m parallel_sgd` is `parallel-sgd`."""

import sys

from .command_line.main import main

if __name__ == "__main__":
    sys.exit(main())
