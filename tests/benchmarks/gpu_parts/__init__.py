"""The parts of ``gpu_session.py``."""
