"""`parallel-sgd run`: start a program on N ranks, watch the ranks, and judge the outcome."""
