"""The state, flattened and copied into slabs. Knows torch; nothing of storage or ranks."""
