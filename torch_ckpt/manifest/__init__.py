"""The format: names, documents, blocks, and the order in which they are published."""
