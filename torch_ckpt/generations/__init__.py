"""Generations: what is there, which one to start from, which ones stay, whether they are sound."""
