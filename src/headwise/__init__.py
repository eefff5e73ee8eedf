"""Run, measure, prune and account for the attention heads of transformers.

The names below are loaded when they are first used, so that ``import headwise`` is instant and
imports neither torch nor transformers.

Example:
    >>> import headwise as hw
    >>> "attention" in dir(hw)
    True
"""

from __future__ import annotations

# Type checkers take this name for true; typing itself is slow to import.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from headwise.artifacts import read_run as read_run
    from headwise.errors import HeadwiseError as HeadwiseError
    from headwise.heads import HeadTable as HeadTable
    from headwise.heads import MeasureInfo as MeasureInfo
    from headwise.kernels import attention as attention
    from headwise.layout import HeadId as HeadId
    from headwise.layout import HeadLayout as HeadLayout
    from headwise.layout import SiteKey as SiteKey
    from headwise.measures import check_measure as check_measure
    from headwise.models import Model as Model
    from headwise.models import discover as discover
    from headwise.models import load as load
    from headwise.models import observe as observe
    from headwise.models import wrap as wrap
    from headwise.models.gate import gate as gate
    from headwise.nn import KVCache as KVCache
    from headwise.nn import MultiHeadAttention as MultiHeadAttention
    from headwise.plans import HeadPlan as HeadPlan
    from headwise.verbs.cost import cost as cost
    from headwise.verbs.importance import importance as importance
    from headwise.verbs.plan import plan as plan
    from headwise.verbs.prune import prune as prune
    from headwise.verbs.redundancy import redundancy as redundancy
    from headwise.verbs.report import report as report
    from headwise.verbs.roles import roles as roles
    from headwise.verbs.scan import scan as scan
    from headwise.verbs.statistics import statistics as statistics
    from headwise.verbs.verify import verify as verify
    from headwise.verbs.watch import watch as watch

    __version__: str

#: Each public name and the module that defines it.
_HOMES = {
    "HeadId": "headwise.layout",
    "HeadLayout": "headwise.layout",
    "HeadPlan": "headwise.plans",
    "HeadTable": "headwise.heads",
    "HeadwiseError": "headwise.errors",
    "KVCache": "headwise.nn",
    "MeasureInfo": "headwise.heads",
    "Model": "headwise.models",
    "MultiHeadAttention": "headwise.nn",
    "SiteKey": "headwise.layout",
    "attention": "headwise.kernels",
    "check_measure": "headwise.measures",
    "cost": "headwise.verbs",
    "discover": "headwise.models",
    "gate": "headwise.models",
    "importance": "headwise.verbs",
    "load": "headwise.models",
    "observe": "headwise.models",
    "plan": "headwise.verbs",
    "prune": "headwise.verbs",
    "read_run": "headwise.artifacts",
    "redundancy": "headwise.verbs",
    "report": "headwise.verbs",
    "roles": "headwise.verbs",
    "scan": "headwise.verbs",
    "statistics": "headwise.verbs",
    "verify": "headwise.verbs",
    "watch": "headwise.verbs",
    "wrap": "headwise.models",
}

__all__ = [  # noqa: PLE0604  (the names of the table are strings)
    "__version__",
    *_HOMES,
]


def __getattr__(name: str) -> Any:
    """Load a public name from the module that defines it."""
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("headwise")
    elif name in _HOMES:
        from importlib import import_module

        value = getattr(import_module(_HOMES[name]), name)
    else:
        raise AttributeError(f"module 'headwise' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__} - {"TYPE_CHECKING"})
