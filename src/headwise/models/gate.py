"""Gates: a number per head (and per example) that its output is multiplied by.

They replace the ``head_mask`` that transformers removed, in every model that the seam reaches. The mean of the values
that each query may see can stand in the place of what a gate takes away.
"""

from __future__ import annotations

import difflib
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from headwise.errors import GateError
from headwise.layout import HeadId, HeadLayout, Site, SiteKey

if TYPE_CHECKING:
    from headwise.models.handle import Model
    from headwise.models.sessions import Session

__all__ = ["Gates", "gate"]

Where = str | SiteKey
Heads = Mapping[Any, Any] | Iterable[HeadId]
#: Gives (B, Q, H, D_v) the mean of the values that each query may see, and the head's own output where it sees none.
Means = Callable[[], Tensor]
_REPLACEMENTS: Final = ("nothing", "running_mean")


@dataclass(frozen=True)
class _Rule:
    """The gates of some heads of one site: ``scale`` is a number, or (n,) or (B, n) beside ``heads`` (n,)."""

    heads: tuple[int, ...]
    scale: float | Tensor

    def vector(self, count: int, output: Tensor) -> Tensor:
        """All ``count`` gates of the site, (H,) or (B, H); made anew for each call, so that gradients flow."""
        index = torch.tensor(self.heads, device=output.device)
        if not isinstance(self.scale, Tensor):
            return torch.ones(count, dtype=output.dtype, device=output.device).index_fill(0, index, self.scale)
        scale = self.scale.to(device=output.device, dtype=output.dtype)
        whole = torch.ones(*scale.shape[:-1], count, dtype=output.dtype, device=output.device)
        return whole.index_copy(-1, index, scale)


class Gates:
    """Gates on the heads of a layout, checked: every site exists, every head is in range.

    Args:
        layout: the heads of the model.
        heads: which heads; see :func:`gate`.
        scale: what they are multiplied by; see :func:`gate`.
        replacement: ``"nothing"``, or ``"running_mean"``; see :func:`gate`.

    Raises:
        GateError: an unknown or ambiguous site, a head out of range or named twice, a scale that does not fit, or an
            unknown replacement.
    """

    replacement: str = "nothing"

    def __init__(
        self, layout: HeadLayout, heads: Heads, scale: float | Tensor = 0.0, *, replacement: str = "nothing"
    ) -> None:
        if replacement not in _REPLACEMENTS:
            said = "" if replacement != "constant" else " (a constant is a bias: see hw.plan and hw.prune)"
            raise GateError(f"replacement must be one of {', '.join(_REPLACEMENTS)}, and is {replacement!r}{said}")
        self.replacement = replacement
        self.rules: dict[SiteKey, _Rule] = {}
        self.used: set[SiteKey] = set()
        for key, rule in _rules(layout, heads, scale):
            if key in self.rules:
                raise GateError(f"{key} is named twice; give all its heads in one place")
            if not _finite(rule.scale):
                raise GateError(f"{key}: scale holds a value that is not finite; give finite numbers")
            self.rules[key] = rule

    def __len__(self) -> int:
        return sum(len(rule.heads) for rule in self.rules.values())

    def apply(self, key: SiteKey, count: int, output_BQHD: Tensor, means: Means | None = None) -> Tensor:
        """``output_BQHD`` times the gates of its site; the tensor itself where the site has none.

        Args:
            key: the site.
            count: how many heads it has.
            output_BQHD: what they put out.
            means: gives what takes the place of a running mean.

        Raises:
            GateError: gates for another number of examples than the call has.
        """
        rule = self.rules.get(key)
        if rule is None:
            return output_BQHD
        self.used.add(key)
        vector = rule.vector(count, output_BQHD)
        if vector.ndim == 2 and vector.shape[0] != output_BQHD.shape[0]:
            raise GateError(
                f"{key}: gates for {vector.shape[0]} examples, but the call has a batch of {output_BQHD.shape[0]}; "
                "give one row per row of the batch that reaches this attention (beams, windows), or one per head"
            )
        gates = vector[:, None, :, None] if vector.ndim == 2 else vector[None, None, :, None]
        return self.replaced(output_BQHD, gates, means)

    def replaced(self, output_BQHD: Tensor, gates: Tensor, means: Means | None) -> Tensor:
        """``output_BQHD`` times ``gates``, with the replacement in the place of what that takes away."""
        if self.replacement == "nothing" or means is None:
            return output_BQHD * gates
        return output_BQHD * gates + means() * (1 - gates)

    def unused(self) -> list[SiteKey]:
        """Sites whose gates have not acted yet."""
        return [key for key in self.rules if key not in self.used]


def _rules(layout: HeadLayout, heads: Heads, scale: float | Tensor) -> Iterator[tuple[SiteKey, _Rule]]:
    chosen: list[tuple[SiteKey, tuple[int, ...], Tensor | None]] = []
    for where, what in _pairs(heads):
        site = _find(layout, where)
        indices, own = _select(site.key, layout.block_of(site.key).query_heads, what)
        if indices:
            chosen.append((site.key, indices, own))
    if not chosen:
        raise GateError("no heads were named; give a mapping such as {'encoder.layer.0': [1, 5]}")
    if any(own is not None for _, _, own in chosen):
        if not _is_default(scale):
            raise GateError("give the scales either inside the mapping or as 'scale', not both")
        if not all(own is not None for _, _, own in chosen):
            raise GateError(
                "some sites have scales of their own and others only head indices; give scales for all or none"
            )
    shared = _shared_scale(scale, sum(len(indices) for _, indices, _ in chosen))
    start = 0
    for key, indices, own in chosen:
        if own is not None:
            yield key, _Rule(indices, own)
        elif isinstance(shared, Tensor):
            yield key, _Rule(indices, shared[..., start : start + len(indices)])
        else:
            yield key, _Rule(indices, shared)
        start += len(indices)


def _finite(scale: float | Tensor) -> bool:
    return bool(torch.isfinite(torch.as_tensor(scale)).all())


def _is_default(scale: float | Tensor) -> bool:
    return not isinstance(scale, Tensor) and scale == 0.0


def _shared_scale(scale: float | Tensor, count: int) -> float | Tensor:
    if isinstance(scale, Tensor):
        if not scale.is_floating_point():
            raise GateError(f"scale must be a floating-point tensor, got {scale.dtype}")
        if scale.ndim == 0:
            return scale.expand(count)
        if scale.ndim > 2 or scale.shape[-1] != count:
            raise GateError(
                f"scale has the shape {tuple(scale.shape)}, but {count} heads are named; "
                f"give ({count},) or (batch, {count})"
            )
        return scale
    try:
        return float(scale)
    except (TypeError, ValueError):
        raise GateError(f"scale must be a number or a tensor, got {type(scale).__name__}") from None


def _pairs(heads: Heads) -> list[tuple[Where, Any]]:
    if isinstance(heads, Mapping):
        if heads and all(isinstance(key, HeadId) for key in heads):
            return _by_site((key, value) for key, value in heads.items())
        return list(heads.items())
    if isinstance(heads, (str, bytes)) or not isinstance(heads, Iterable):
        raise GateError(f"heads must be a mapping from sites to heads, or HeadIds; got {type(heads).__name__}")
    listed = list(heads)
    named = [getattr(one, "id", one) for one in listed]  # rows of a table name their head
    for one in named:
        if not isinstance(one, HeadId):
            raise GateError(
                "heads must be a mapping from sites to heads, HeadIds, or rows of a HeadTable; the list holds "
                f"{type(one).__name__}"
            )
    return _by_site((one, None) for one in named)


def _by_site(heads: Iterable[tuple[HeadId, Any]]) -> list[tuple[Where, Any]]:
    grouped: dict[SiteKey, list[tuple[int, Any]]] = {}
    for head, value in heads:
        grouped.setdefault(head.site, []).append((head.head, value))
    pairs: list[tuple[Where, Any]] = []
    for key, items in grouped.items():
        if len({head for head, _ in items}) < len(items):
            raise GateError(f"{key}: a head is named twice in {sorted(head for head, _ in items)}")
        given = all(value is None for _, value in items)
        pairs.append((key, [head for head, _ in items] if given else dict(items)))
    return pairs


def _select(key: SiteKey, count: int, what: Any) -> tuple[tuple[int, ...], Tensor | None]:
    """Head indices, and their own scales where ``what`` carries them."""
    if isinstance(what, Tensor) and what.dtype == torch.bool:
        raise GateError(
            f"{key}: a boolean tensor does not say whether True keeps or removes; give head indices or scales"
        )
    if isinstance(what, Tensor) and what.is_floating_point():
        if what.ndim not in (1, 2) or what.shape[-1] != count:
            raise GateError(
                f"{key}: scales of shape {tuple(what.shape)} for {count} heads; give ({count},) or (batch, {count})"
            )
        return tuple(range(count)), what
    if isinstance(what, Mapping):
        indices = _indices(key, count, what.keys())
        values = list(what.values())
        if any(isinstance(value, Tensor) for value in values):
            return indices, torch.stack([torch.as_tensor(value) for value in values], dim=-1)
        return indices, torch.tensor([float(value) for value in values])
    if isinstance(what, Tensor):
        what = what.tolist()
    return _indices(key, count, what), None


def _indices(key: SiteKey, count: int, what: Any) -> tuple[int, ...]:
    if isinstance(what, (str, bytes)):
        raise GateError(f"{key}: heads must be indices, got the text {what!r}")
    try:
        listed: Sequence[Any] = [what] if isinstance(what, int) else list(what)
    except TypeError:
        raise GateError(f"{key}: heads must be indices, got {type(what).__name__}") from None
    indices = []
    for one in listed:
        if isinstance(one, bool):
            raise GateError(f"{key}: heads must be indices counted from 0, got {one!r}")
        try:
            indices.append(operator.index(one))
        except TypeError:
            raise GateError(f"{key}: heads must be indices counted from 0, got {one!r}") from None
    for index in indices:
        if not 0 <= index < count:
            raise GateError(f"{key}: there is no head {index}; it has the heads 0 to {count - 1}")
    if len(set(indices)) < len(indices):
        raise GateError(f"{key}: a head is named twice in {indices}")
    return tuple(indices)


def _find(layout: HeadLayout, where: Where) -> Site:
    """The one site that ``where`` names: a SiteKey, a module path, ``path@call``, or a prefix of a path."""
    if isinstance(where, SiteKey):
        for site in layout.sites:
            if site.key == where:
                return site
        raise GateError(f"the model has no site {where!r}; {_near(layout, where.module)}")
    if not isinstance(where, str):
        raise GateError(f"a site is named by its module path or a SiteKey, got {type(where).__name__}")
    path, _, call = where.partition("@")
    found = [site for site in layout.sites if site.key.module == path]
    found = found or [site for site in layout.sites if site.key.module.startswith(path + ".")]
    if call:
        found = [site for site in found if str(site.key.call) == call]
    if len(found) == 1:
        return found[0]
    if not found:
        raise GateError(f"the model has no attention at {where!r}; {_near(layout, path)}")
    names = ", ".join(f"{site.key.module}@{site.key.call} ({site.key.kind})" for site in found[:12])
    more = f" and {len(found) - 12} more" if len(found) > 12 else ""
    raise GateError(f"{where!r} names {len(found)} sites: {names}{more}; name one of them")


def _near(layout: HeadLayout, path: str) -> str:
    names = list(dict.fromkeys(site.key.module for site in layout.sites))
    near = [name for name in names if f".{path}." in f".{name}."] or difflib.get_close_matches(path, names, 5, 0.5)
    return (
        f"did you mean {', '.join(near[:5])}?"
        if near
        else f"its sites are {', '.join(names[:8])}{', ...' * (len(names) > 8)}"
    )


@contextmanager
def gate(
    model: Model | nn.Module, heads: Heads, *, scale: float | Tensor = 0.0, replacement: str = "nothing"
) -> Iterator[Session]:
    """Inside the block, the output of the named heads is multiplied by ``scale``.

    The multiplication happens on each head's output, before the output projection, so a scale of 0 equals
    zeroed columns of that projection. It works in train and eval mode and in ``generate()``; the model is
    exactly as before afterwards, whatever ends the block. It acts on the model, in every thread: to gate one model
    differently in several threads at once, give each thread its own copy of the model.

    Args:
        model: a loaded or wrapped model, or the module itself.
        heads: ``{site: [heads]}``, where a site is a :class:`~headwise.layout.SiteKey`, a module path, or a
            prefix of a path that fits one site (``"encoder.layer.0"``; ``"path@3"`` is the fourth call of a shared
            module); or an iterable of :class:`~headwise.layout.HeadId`, or a
            :class:`~headwise.heads.HeadTable` (``table.top("entropy", 3)``). Instead of a list of heads a site may
            have ``{head: scale}`` or a floating-point tensor (heads,) or (batch, heads) of all its scales.
        scale: a number, or a tensor (n,) or (batch, n) for the n named heads in order. Gradients flow to it.
        replacement: what takes the place of the part 1 - scale that is taken away: ``"nothing"``, or
            ``"running_mean"``, the plain mean of the values that the query may see (causal: of those so far). A row
            that sees no key keeps what the model gives it.

    Yields:
        The session; ``session.forwards`` counts the forward passes so far.

    Raises:
        GateError: a site or head that does not exist, an ambiguous name, a scale of the wrong shape, an unknown
            replacement; or, at the end of the block, gates that never acted although the model ran.

    Example:
        >>> import torch
        >>> from transformers import BertConfig, BertModel
        >>> config = BertConfig(vocab_size=31, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        ...                     intermediate_size=16)
        >>> bert = BertModel(config).eval()
        >>> ids = torch.tensor([[1, 5, 7]])
        >>> with torch.no_grad(), gate(bert, {"encoder.layer.0": [1]}):
        ...     off = bert(ids).last_hidden_state
        >>> bool((off != bert(ids).last_hidden_state).any())
        True
    """
    from headwise.models.sessions import layout_of, observe

    gates = Gates(layout_of(model), heads, scale, replacement=replacement)
    with observe(model, gates=gates) as session:
        yield session
        session.check_gates()
