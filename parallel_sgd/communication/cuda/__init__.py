"""Arrays of GPUs on their way between ranks, and NCCL's collectives. No MPI is needed."""
