"""Which accumulation factor applies where, and the windows that follow from it."""
