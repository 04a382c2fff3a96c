"""The accumulation window: its state, where it opens, and how checkpoints save it."""
