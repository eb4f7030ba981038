"""DistributedDataParallel with a compressed exchange: a communication hook."""
