"""What is done to ``.grad``, the GradScaler and the process group."""
