"""The commands `train`, `predict`, `simulate`, `plan`, `info`, `doctor` and `cluster`."""
