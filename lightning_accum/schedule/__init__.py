"""Which accumulation factor applies when, and the windows that follow from it."""
