"""Checks of single arguments: a positive int, one of several strings."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import get_args

SHOWN = 6  # entries of a long schedule that a message shows


def positive_int(value: object, call: str, must_be: str = "must be an int >= 1") -> int:
    """Return the value if it is an int of at least 1.

    Args:
        value: the user's.
        call: the user's call as code, for the error: ``"ValidateEveryNSteps(n=0)"``.
        must_be: what is accepted, for the error.

    Raises:
        TypeError: the value is not an int. ``True`` is not an int here.
        ValueError: the value is below 1.

    Example:
        >>> positive_int(3, "f(n=3)")
        3
        >>> positive_int(0, "f(n=0)", "must be an int >= 1 (effective steps)")
        Traceback (most recent call last):
        ValueError: `f(n=0)`: must be an int >= 1 (effective steps).
    """
    message = f"`{call}`: {must_be}."
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(message)
    if value < 1:
        raise ValueError(message)
    return value


def one_of(value: object, call: str, accepted: object) -> None:
    """Raise ValueError unless the value is one of a ``Literal``'s.

    Args:
        value: the user's.
        call: the user's call as code, for the error.
        accepted: the ``Literal`` type.

    Example:
        >>> from typing import Literal
        >>> one_of("square", "f(rule='square')", Literal["linear", "sqrt"])
        Traceback (most recent call last):
        ValueError: `f(rule='square')`: accepted are 'linear' and 'sqrt'.
    """
    if value not in get_args(accepted):
        raise ValueError(f"`{call}`: accepted are {' and '.join(map(repr, get_args(accepted)))}.")


def join_first(texts: Iterable[str], total: int, separator: str = ", ") -> str:
    """Join texts; if there are more than `SHOWN`, only the first ones and the number of the rest.

    Example:
        >>> join_first(map(str, range(4)), 4), join_first(map(str, range(10_000)), 10_000)
        ('0, 1, 2, 3', '0, 1, 2, 3, 4, 5, ... (9994 more)')
    """
    shown = separator.join(islice(texts, SHOWN))
    return shown if total <= SHOWN else f"{shown}{separator}... ({total - SHOWN} more)"
