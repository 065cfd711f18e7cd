"""Which rank saves and reads what. Knows ranks and plans; nothing of bytes or storage."""
