"""Whether the accumulated gradient equals that of the whole batch, and why not."""
