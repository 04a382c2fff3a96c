"""Out-of-memory errors of a device or a host: how to recognize them, and the error if no retry helps."""

from __future__ import annotations

import torch

from lightning_accum.seams.roots import is_oom_error

OutOfMemoryError = torch.cuda.OutOfMemoryError  # the name of `torch.OutOfMemoryError` in every torch version

# Fact: CUDA's libraries allocate outside torch's pool, for a first handle or a plan; on a full device they report one
# of these ("not initialized" too) as a plain RuntimeError, which neither torch's class nor Lightning's function covers.
FAILED_ALLOCATIONS = (
    *("CUBLAS_STATUS_ALLOC_FAILED", "CUBLAS_STATUS_NOT_INITIALIZED", "CUSOLVER_STATUS_ALLOC_FAILED"),
    *("CUDNN_STATUS_ALLOC_FAILED", "DEVICE_ALLOCATION_FAILED", "CUSPARSE_STATUS_ALLOC_FAILED", "CUFFT_ALLOC_FAILED"),
)


class WholeBatchOutOfMemoryError(OutOfMemoryError):
    """Memory ran out, and smaller pieces do not help."""


def is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether memory ran out, by torch's class or by messages of CUDA's libraries and of the CPU."""
    if isinstance(error, OutOfMemoryError) or is_oom_error(RuntimeError(str(error))):
        return True
    return any(status in str(error) for status in FAILED_ALLOCATIONS)


def without_way_out(error: RuntimeError | None, method: str) -> RuntimeError:
    """Return the error if a single item does not fit; a new one on ranks whose item did fit."""
    sentence = f"A single item did not fit: `{method}` cannot make the micro-batch smaller."
    if error is None:
        return OutOfMemoryError(f"Another rank ran out of memory. {sentence}")
    error.args = (f"{error} {sentence}",)  # `add_note` needs Python 3.11
    return error
