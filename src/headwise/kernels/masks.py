"""Who may see whom: blocks of the visibility matrix, ranges of keys, and counts, never the whole of it.

A query at position i (row number + ``Problem.offset``) sees a key at position j when every rule of
:class:`~headwise.kernels.problem.Visible` allows it and no added term hides it. An added term hides
where its value is at or below :func:`hiding_value` of its dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from headwise.kernels.problem import Problem, Visible

__all__ = ["all_keys_seen", "hiding_value", "key_range", "sure_range", "visible_at", "visible_block", "visible_counts"]

Span = tuple[int, int]

#: Rows per step when visibility is counted block by block.
_COUNT_ROWS = 256


def hiding_value(dtype: torch.dtype) -> float:
    """The value at or below which an added term hides its key.

    ``finfo(dtype).min``; for float32 and float64 the smallest finite bfloat16, so that a mask made in
    half precision and widened later still hides.
    """
    return max(torch.finfo(dtype).min, torch.finfo(torch.bfloat16).min)


def has_rules(visible: Visible) -> bool:
    """Whether anything but an added term can hide a key."""
    return visible.causal or visible.window is not None or has_tensor_rules(visible)


def has_tensor_rules(visible: Visible) -> bool:
    """Whether a key may be hidden by data rather than by its distance from the query."""
    return visible.key_padding is not None or visible.mask is not None or visible.predicate is not None


def _limits(problem: Problem, first: Any, last: Any) -> tuple[Any, Any]:
    """The first key that causality and window show to position ``first``, and the one after the last of ``last``.

    Not yet cut to the keys that there are. Positions are whole numbers, or tensors of them.
    """
    visible = problem.visible
    low, high = 0, problem.k.shape[2]
    if visible.causal:
        high = last + 1
    if visible.window is not None:
        low = first - visible.window + 1
        if not visible.causal:
            high = last + visible.window
    return low, high


def key_range(problem: Problem, start: int, stop: int) -> Span:
    """Keys ``[low, high)`` outside which no query of rows ``[start, stop)`` sees anything, by causality and window."""
    keys = problem.k.shape[2]
    low, high = _limits(problem, start + problem.offset, stop - 1 + problem.offset)
    low = min(max(low, 0), keys)
    return low, max(low, min(max(high, 0), keys))


def sure_range(problem: Problem, start: int, stop: int) -> Span:
    """Keys ``[low, high)`` that causality and window show to *every* query of rows ``[start, stop)``."""
    keys = problem.k.shape[2]
    low, high = _limits(problem, stop - 1 + problem.offset, start + problem.offset)
    low = min(max(low, 0), keys)
    return low, max(low, min(max(high, 0), keys))


def visible_block(
    problem: Problem, rows: Span, keys: Span, batch: Span | None = None, heads: Span | None = None
) -> Tensor | None:
    """Which keys of ``keys`` the queries of ``rows`` may see; None when they see all of them.

    Args:
        problem: the attention problem.
        rows: query rows ``[start, stop)``.
        keys: key positions ``[start, stop)``.
        batch: batch indices ``[start, stop)``; all by default.
        heads: query heads ``[start, stop)``; all by default.

    Returns:
        bool, four axes, broadcastable to (batch, heads, rows, keys), True = visible; or None.

    Example:
        >>> import torch
        >>> from headwise.kernels import Problem, Visible, visible_block
        >>> x = torch.zeros(1, 1, 3, 2)
        >>> visible_block(Problem(x, x, x, Visible(causal=True)), (0, 3), (0, 3)).int()[0, 0].tolist()
        [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    """
    batch = batch or (0, problem.q.shape[0])
    heads = heads or (0, problem.q.shape[1])
    parts = list(_rules(problem, rows, keys, batch, heads))
    if not parts:
        return None
    seen = parts[0]
    for part in parts[1:]:
        seen = seen & part
    return seen


def _rules(problem: Problem, rows: Span, keys: Span, batch: Span, heads: Span) -> Iterator[Tensor]:
    visible, device = problem.visible, problem.q.device
    low, high = sure_range(problem, *rows)
    structural = (visible.causal or visible.window is not None) and not (low <= keys[0] and keys[1] <= high)
    if structural or visible.predicate is not None:
        i = torch.arange(rows[0], rows[1], device=device).view(1, 1, -1, 1) + problem.offset
        j = torch.arange(keys[0], keys[1], device=device).view(1, 1, 1, -1)
        if structural:
            yield _by_distance(visible, i, j)
        if visible.predicate is not None:
            b = torch.arange(batch[0], batch[1], device=device).view(-1, 1, 1, 1)
            h = torch.arange(heads[0], heads[1], device=device).view(1, -1, 1, 1)
            seen = visible.predicate(b, h, i, j).to(torch.bool)
            yield seen.view((1,) * (4 - seen.ndim) + tuple(seen.shape)) if seen.ndim < 4 else seen
    if visible.key_padding is not None:
        yield visible.key_padding[batch[0] : batch[1], None, None, keys[0] : keys[1]]
    if visible.mask is not None:
        yield cut(visible.mask, batch, heads, rows, keys)
    for term in problem.rule.added:
        yield cut(term, batch, heads, rows, keys) > hiding_value(term.dtype)


def _by_distance(visible: Visible, i: Tensor, j: Tensor) -> Tensor:
    """Causality and window for positions i and j (either rule must be present)."""
    if visible.window is None:
        return j <= i
    if visible.causal:
        return (j <= i) & (j > i - visible.window)
    return (i - j).abs() < visible.window


def cut(tensor: Tensor, *spans: Span) -> Tensor:
    """A block of a tensor that broadcasts: axes of length 1 stay whole."""
    where = tuple(slice(None) if size == 1 else slice(*span) for size, span in zip(tensor.shape, spans, strict=True))
    return tensor[where]


def visible_at(problem: Problem, keys_PBQ: Tensor) -> Tensor:
    """Whether each query may see the one key named for it: bool, broadcastable to (P, B, H, Q); False for -1.

    ``keys_PBQ`` is (P, B or 1, Q), or (P, B or 1, H or 1, Q) where heads name keys of their own.
    """
    visible = problem.visible
    batch, heads, queries, _ = problem.q.shape
    device = problem.q.device
    j = keys_PBQ[:, :, None, :] if keys_PBQ.ndim == 3 else keys_PBQ
    i = torch.arange(queries, device=device) + problem.offset
    b = torch.arange(batch, device=device).view(1, -1, 1, 1)
    h = torch.arange(heads, device=device).view(1, 1, -1, 1)
    seen = j >= 0
    j = j.clamp(min=0)
    if visible.causal or visible.window is not None:
        seen = seen & _by_distance(visible, i, j)
    if visible.predicate is not None:
        seen = seen & visible.predicate(b, h, i, j).to(torch.bool)
    if visible.key_padding is not None:
        seen = seen & visible.key_padding[b, j]
    if visible.mask is not None:
        seen = seen & at_keys(visible.mask, j, problem)
    for term in problem.rule.added:
        seen = seen & (at_keys(term, j, problem) > hiding_value(term.dtype))
    return seen


def at_keys(tensor: Tensor, j: Tensor, problem: Problem) -> Tensor:
    """The entries of a broadcastable (B, H, Q, K) tensor at key ``j`` (P, B or 1, 1, Q): (P, B, H or 1, Q)."""
    device = problem.q.device
    b = torch.arange(problem.q.shape[0], device=device).view(1, -1, 1, 1) if tensor.shape[0] != 1 else 0
    h = torch.arange(problem.q.shape[1], device=device).view(1, 1, -1, 1) if tensor.shape[1] != 1 else 0
    i = torch.arange(problem.q.shape[2], device=device) if tensor.shape[2] != 1 else 0
    if tensor.shape[3] == 1:
        j = torch.zeros_like(j)
    return tensor[b, h, i, j]


def by_distance_alone(problem: Problem) -> bool:
    """Whether causality, window and padding alone decide who sees whom, so that keys are seen in ranges."""
    visible = problem.visible
    return visible.mask is None and visible.predicate is None and not problem.rule.added


def seen_ranges(problem: Problem) -> tuple[Tensor, Tensor]:
    """For each query row the first key that causality and window show it, and the one after the last; int64 (Q,)."""
    keys = problem.k.shape[2]
    i = torch.arange(problem.q.shape[2], device=problem.q.device) + problem.offset
    low, high = (torch.zeros_like(i) + one for one in _limits(problem, i, i))
    return low.clamp(0, keys), high.clamp(0, keys)


def visible_counts(problem: Problem) -> Tensor:
    """How many keys each query may see.

    Returns:
        int64 (B, H, Q), or (B, 1, Q) when all heads of the problem see the same keys.

    Example:
        >>> import torch
        >>> from headwise.kernels import Problem, Visible, visible_counts
        >>> x = torch.zeros(1, 2, 4, 2)
        >>> visible_counts(Problem(x, x, x, Visible(causal=True, window=2)))[0, 0].tolist()
        [1, 2, 2, 2]
    """
    batch, _, queries, _ = problem.q.shape
    visible = problem.visible
    if not by_distance_alone(problem):
        return _counted(problem)
    low, high = seen_ranges(problem)
    if visible.key_padding is None:
        return (high - low).clamp(min=0).view(1, 1, queries).expand(batch, 1, queries)
    before = torch.nn.functional.pad(visible.key_padding.long().cumsum(-1), (1, 0))
    return (before[:, high] - before[:, low]).clamp(min=0).view(batch, 1, queries)


def _counted(problem: Problem) -> Tensor:
    batch, _, queries, _ = problem.q.shape
    parts = []
    for start in range(0, queries, _COUNT_ROWS):
        stop = min(start + _COUNT_ROWS, queries)
        span = key_range(problem, start, stop)
        seen = visible_block(problem, (start, stop), span)
        assert seen is not None
        shape = (batch, seen.shape[1], stop - start, span[1] - span[0])
        parts.append(seen.expand(shape).sum(-1))
    if not parts:
        return torch.zeros(batch, 1, 0, dtype=torch.int64, device=problem.q.device)
    width = max(part.shape[1] for part in parts)
    return torch.cat([part.expand(batch, width, -1) for part in parts], dim=-1)


def all_keys_seen(problem: Problem) -> bool:
    """Whether no rule can hide any key from any query (judged without looking at data)."""
    return not has_rules(problem.visible) and not problem.rule.added
