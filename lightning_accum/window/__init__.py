"""The accumulation window: its state, where it opens, and how checkpoints keep it."""
