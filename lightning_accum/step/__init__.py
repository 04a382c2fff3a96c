"""The accumulation step, in both kinds of optimization."""
