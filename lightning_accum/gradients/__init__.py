"""Operations on ``.grad``, the GradScaler and the process group."""
