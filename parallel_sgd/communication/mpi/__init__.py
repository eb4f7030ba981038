"""Ranks that are processes of MPI."""
