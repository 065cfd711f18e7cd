"""The side process that makes snapshots durable; imports neither torch nor a framework."""
