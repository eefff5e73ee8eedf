"""One tree of errors: everything that headwise refuses is a :class:`HeadwiseError`.

A message says which argument it is about, the rule, what came instead, and what to do next.
The command line turns any of these into one sentence and exit status 1; every other exception
is a defect and keeps its traceback.
"""

from __future__ import annotations

__all__ = [
    "DataError",
    "GateError",
    "HeadwiseError",
    "InputError",
    "MeasureError",
    "ModelError",
    "RunError",
    "ShapeError",
    "UnsupportedError",
]


class HeadwiseError(Exception):
    """Base class of every refusal that headwise makes on purpose."""


class InputError(HeadwiseError, ValueError):
    """An argument has a value that its rule does not allow."""


class ShapeError(InputError):
    """A tensor's shape, dtype or device does not fit the others."""


class DataError(InputError):
    """A text or data file cannot be used: missing, empty, binary, wrong field."""


class ModelError(HeadwiseError):
    """A model cannot be loaded, or its weights and its config disagree."""


class UnsupportedError(ModelError):
    """The model, or a feature of it, is of a kind that headwise does not understand."""


class GateError(HeadwiseError):
    """A switch on a head could not act."""


class MeasureError(HeadwiseError):
    """A measurement would not be true, so it was not given."""


class RunError(HeadwiseError):
    """A run folder or a saved file cannot be read or written."""
