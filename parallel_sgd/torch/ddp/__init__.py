"""A communication hook for DistributedDataParallel, with a compressed exchange."""
