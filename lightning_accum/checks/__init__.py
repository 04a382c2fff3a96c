"""Errors, warnings and log lines about settings and arguments. Nothing here has side effects."""
