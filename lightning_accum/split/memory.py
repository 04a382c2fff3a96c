"""Errors of a device or a host that has no memory left: how to know them, and what to say when nothing helps."""

from __future__ import annotations

import torch

from lightning_accum.seams.roots import is_oom_error

OutOfMemoryError = torch.cuda.OutOfMemoryError  # the name of `torch.OutOfMemoryError` that every torch has

# Fact: CUDA's libraries allocate outside of torch's pool, for a first handle or a plan; with a full device they report
# one of these as a plain RuntimeError, "not initialized" too. Neither torch's class nor Lightning's function covers it.
FAILED_ALLOCATIONS = (
    *("CUBLAS_STATUS_ALLOC_FAILED", "CUBLAS_STATUS_NOT_INITIALIZED", "CUSOLVER_STATUS_ALLOC_FAILED"),
    *("CUDNN_STATUS_ALLOC_FAILED", "DEVICE_ALLOCATION_FAILED", "CUSPARSE_STATUS_ALLOC_FAILED", "CUFFT_ALLOC_FAILED"),
)


class WholeBatchOutOfMemoryError(OutOfMemoryError):
    """Memory ran out where smaller pieces are no help."""


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether memory ran out: torch's own class, or the messages of CUDA's libraries and of the CPU."""
    if isinstance(error, OutOfMemoryError) or is_oom_error(RuntimeError(str(error))):
        return True
    return any(status in str(error) for status in FAILED_ALLOCATIONS)


def without_way_out(error: RuntimeError | None, method: str) -> RuntimeError:
    """Return the error where a single item does not fit; a new one on ranks that had memory for theirs."""
    sentence = f"One single item did not fit: `{method}` cannot make the micro-batch smaller."
    if error is None:
        return OutOfMemoryError(f"Another rank ran out of memory. {sentence}")
    error.args = (f"{error} {sentence}",)  # `add_note` is of Python 3.11
    return error
