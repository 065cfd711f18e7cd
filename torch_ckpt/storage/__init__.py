"""Bytes by name, in a folder of this host or behind an fsspec URL."""
