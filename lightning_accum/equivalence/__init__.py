"""Check whether the accumulated gradient equals the whole batch's, and find out why not."""
