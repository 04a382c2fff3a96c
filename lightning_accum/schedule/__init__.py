"""Which accumulation factor applies when, and the resulting windows."""
