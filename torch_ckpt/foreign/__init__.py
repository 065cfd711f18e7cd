"""Checkpoints that other programs wrote, read without running any of what they hold."""
