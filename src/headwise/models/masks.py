"""Masks without an n x n tensor: what the model asked for, kept as a description.

Transformers builds the mask of every layer kind with one function, looked up by the name of the
attention implementation. Ours returns a :class:`CompactMask`, which remembers the arguments. It is
turned into :class:`~headwise.kernels.problem.Visible` where headwise computes, and into the mask
that the model's own implementation expects where that one computes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import torch
from torch import Tensor
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from transformers import masking_utils as theirs
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from headwise.errors import UnsupportedError
from headwise.kernels.problem import Visible

__all__ = ["CompactMask", "CompactMaskError", "compact_mask"]

MaskFunction = Callable[..., Any]

_AND = theirs.and_masks().__code__
_SLIDING = theirs.sliding_window_overlay(1).__code__
_SLIDING_BOTH = theirs.sliding_window_bidirectional_overlay(1).__code__


class CompactMaskError(UnsupportedError):
    """A model computed with its attention mask where only a description of it was handed over.

    ``what`` says what it did.
    """

    def __init__(self, what: str) -> None:
        self.what = f"the model computes with its attention mask ({what})"
        super().__init__(
            f"{self.what}, so it cannot be handed over as a description; discover the model with an example that "
            "reaches this part, and the session will use whole masks instead"
        )


@dataclass(frozen=True)
class _Pattern:
    """The parts of a conjunction of mask functions: the recognised ones, and the rest."""

    causal: bool
    back: int | None  # keys j > i - back
    around: int | None  # keys |i - j| <= around
    rest: tuple[MaskFunction, ...]


def _refuse(what: str) -> NoReturn:
    raise CompactMaskError(what)


class CompactMask:
    """The arguments of one mask, and nothing of its size.

    It is no tensor: any arithmetic, indexing or attribute access on it raises
    :class:`CompactMaskError`, so that a model that computes with its mask is never measured wrongly.
    """

    __slots__ = ("__weakref__", "_own", "_visible", "arguments")

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self.arguments = dict(arguments)
        self._visible: Visible | None = None
        self._own: dict[str, Any] = {}

    def __repr__(self) -> str:
        return f"CompactMask(batch={self.batch}, queries={self.queries}, keys={self.keys})"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        _refuse(f"it reads '.{name}'")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _refuse(f"it calls '{getattr(func, '__name__', func)}'")

    def __deepcopy__(self, memo: dict[int, Any]) -> CompactMask:
        return self

    @property
    def ndim(self) -> int:
        """Axes of the mask that it describes: (batch, 1, queries, keys)."""
        return 4

    @property
    def shape(self) -> torch.Size:
        """Shape of the mask that it describes."""
        return torch.Size((self.batch, 1, self.queries, self.keys))

    @property
    def batch(self) -> int:
        """Number of rows in the batch."""
        return int(self.arguments["batch_size"])

    @property
    def queries(self) -> int:
        """Number of query positions."""
        return int(self.arguments["q_length"])

    @property
    def keys(self) -> int:
        """Number of key positions."""
        return int(self.arguments["kv_length"])

    def own(self, implementation: str) -> Any:
        """The mask that ``implementation`` expects, as its own mask function makes it."""
        if implementation not in self._own:
            builder = ALL_MASK_ATTENTION_FUNCTIONS.get(implementation)
            self._own[implementation] = None if builder is None else builder(**self.arguments)
        return self._own[implementation]

    def visible(self) -> Visible:
        """The same mask as rules over positions."""
        if self._visible is None:
            self._visible = self._read()
        return self._visible

    def _read(self) -> Visible:
        key_offset = int(self.arguments.get("kv_offset", 0))
        pattern = _pattern(self.arguments.get("mask_function", theirs.causal_mask_function))
        rest = pattern.rest
        windows = [w for w in (pattern.back, None if pattern.around is None else pattern.around + 1) if w is not None]
        if pattern.back is not None and not pattern.causal:
            windows = [w for w in windows if w is not pattern.back]
            rest = (*rest, theirs.sliding_window_overlay(pattern.back))
        return Visible(
            causal=pattern.causal,
            window=min(windows) if windows else None,
            offset=int(self.arguments.get("q_offset", 0)) - key_offset,
            key_padding=self._padding(key_offset),
            predicate=_predicate(rest, key_offset, bool(self.arguments.get("use_vmap"))) if rest else None,
        )

    def _padding(self, key_offset: int) -> Tensor | None:
        given = self.arguments.get("attention_mask")
        if given is None:
            return None
        if not isinstance(given, Tensor) or given.ndim != 2:
            _refuse(f"the padding mask is not (batch, keys) but {getattr(given, 'shape', type(given).__name__)}")
        whole = theirs.prepare_padding_mask(given, self.keys, key_offset)
        part = whole[:, key_offset : key_offset + self.keys].bool()
        return None if bool(part.all()) else part


#: What a model may do with a mask that is a tensor.
_USES: Final = (
    *("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "matmul", "rmatmul", "pow"),
    *("neg", "abs", "invert", "and", "rand", "or", "ror", "xor", "rxor", "eq", "ne", "lt", "le", "gt", "ge"),
    *("bool", "getitem", "setitem", "len", "iter", "contains", "float", "int", "index"),
)


def _touching(name: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any) -> NoReturn:
        _refuse(f"it uses '{name}'")

    return refuse


for _name in _USES:
    setattr(CompactMask, f"__{_name}__", _touching(f"__{_name}__"))
CompactMask.__hash__ = object.__hash__  # type: ignore[method-assign]


def compact_mask(**arguments: Any) -> CompactMask:
    """The function registered in ``AttentionMaskInterface``: keep the description.

    A model may hand the mask that it has made to a part that makes masks itself; as with a whole mask, it stays.
    """
    made = arguments.get("attention_mask")
    if isinstance(made, CompactMask):
        return made
    for name in ("q_offset", "kv_offset"):  # a static cache counts on in the tensor that it gives
        arguments[name] = int(arguments.get(name, 0))
    return CompactMask(arguments)


def _conjuncts(function: MaskFunction) -> Iterator[MaskFunction]:
    if getattr(function, "__code__", None) is _AND:
        for part in _cell(function, "mask_functions"):
            yield from _conjuncts(part)
    else:
        yield function


def _cell(function: MaskFunction, name: str) -> Any:
    """The value that a closure of transformers holds under ``name``."""
    return inspect.getclosurevars(function).nonlocals[name]


def _pattern(function: MaskFunction) -> _Pattern:
    causal, back, around, rest = False, None, None, []
    for part in _conjuncts(function):
        code = getattr(part, "__code__", None)
        if part is theirs.causal_mask_function:
            causal = True
        elif part is theirs.bidirectional_mask_function:
            continue
        elif code is _SLIDING:
            width = int(_cell(part, "sliding_window"))
            back = width if back is None else min(back, width)
        elif code is _SLIDING_BOTH:
            width = int(_cell(part, "sliding_window"))
            around = width if around is None else min(around, width)
        else:
            rest.append(part)
    return _Pattern(causal, back, around, tuple(rest))


def _predicate(functions: tuple[MaskFunction, ...], key_offset: int, vmapped: bool) -> Callable[..., Tensor]:
    """The rules that are not recognised, asked block by block; transformers shows every head index 0."""
    function = functions[0] if len(functions) == 1 else theirs.and_masks(*functions)

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        places = (batch, torch.zeros_like(head), query + key_offset, key + key_offset)
        if not vmapped:
            answer: Tensor = function(*places)
            return answer
        shape = (batch + head + query + key).shape
        flat = [place.expand(shape).reshape(-1) for place in places]
        with TransformGetItemToIndex():
            each: Tensor = torch.vmap(function)(*flat)
        return each.reshape(shape)

    return visible
