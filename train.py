#!/usr/bin/env python
"""Train a model on all ranks: `mpiexec -hostfile hosts python train.py --help`."""

import sys

from parallel_sgd.command_line.train.command import main

if __name__ == "__main__":
    sys.exit(main())
