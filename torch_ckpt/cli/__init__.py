"""The `torch-ckpt` command. Knows the engine and the terminal; nothing imports it."""
