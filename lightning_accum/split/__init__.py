"""One loader batch in several micro-batches."""
