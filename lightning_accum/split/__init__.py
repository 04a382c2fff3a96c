"""Splitting one loader batch into several micro-batches."""
