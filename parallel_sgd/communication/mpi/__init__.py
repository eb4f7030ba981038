"""Ranks as processes of MPI."""
