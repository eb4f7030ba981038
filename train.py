#!/usr/bin/env python
"""Train a model on all ranks: `mpiexec -hostfile hosts python train.py --help`."""

import sys

try:
    from parallel_sgd.command_line.train import main
except KeyboardInterrupt:
    print("parallel-sgd: interrupted", file=sys.stderr)
    sys.exit(130)

if __name__ == "__main__":
    sys.exit(main())
