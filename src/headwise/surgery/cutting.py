"""Cutting one block: its slices, and the telling under which its own code still computes the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from torch import Tensor, nn

from headwise.errors import UnsupportedError
from headwise.layout import Block
from headwise.models.cut_modules import HeadCut, install, restate
from headwise.models.discovery import MODEL_FAILURES
from headwise.models.probe import run_model
from headwise.models.restore import eager, unchanged
from headwise.models.stock import replaced_while_running
from headwise.surgery.averaging import Carriers, carriers_of, lay_means, refuse_uneven_heads
from headwise.surgery.caches import copied, holds_cache
from headwise.surgery.keeping import Kept, kept_of
from headwise.surgery.proof import Truth, largest_difference
from headwise.surgery.slices import (
    Slice,
    apply,
    extra_slices,
    guessed_slices,
    projection_slices,
    refuse_shared,
    row_slices,
)
from headwise.surgery.telling import bias_travels, tellings
from headwise.surgery.watching import Calls, place_of, replaced_inputs

__all__ = ["BlockCut", "cut_block", "planned_cuts"]

#: How many guesses about what has an axis of heads are taken back one at a time.
_MOST: Final = 8
#: Words in the name of a norm of queries, keys or values.
_OF_HEADS: Final = ("q_", "k_", "v_", "query", "key", "value", "qk")


@dataclass(frozen=True)
class BlockCut:
    """A cut of one block, worked out and not yet made.

    Attributes:
        block: before the cut.
        kept: what is left of it.
        slices: of its projections.
        extras: of what else seems to have an axis of heads; the proof decides which of them it is.
        rows: of linear layers beside the projections that seem to put out the heads side by side (keys of relative
            positions, gates); the proof decides, again.
        carriers: heads that stay in order to put out a running mean, and which heads each stands for.
        guesses: of linear layers that may put out another width for every head; tried last.
    """

    block: Block
    kept: Kept
    slices: tuple[Slice, ...]
    extras: tuple[Slice, ...]
    rows: tuple[Slice, ...] = ()
    carriers: Carriers = field(default_factory=dict)
    guesses: tuple[Slice, ...] = ()

    @property
    def beside(self) -> tuple[Slice, ...]:
        """What may have to be cut beside the projections."""
        return (*self.extras, *self.rows, *self.guesses)

    @property
    def trials(self) -> tuple[tuple[Slice, ...], ...]:
        """What may have to be cut beside the projections, the likeliest first: all, all but one, one kind, nothing.

        At the very end all of it with the guesses.
        """
        every = (*self.extras, *self.rows)
        found = [every, self.extras, self.rows]
        found += [tuple(one for one in every if one is not other) for other in every[:_MOST]]
        return tuple(dict.fromkeys((*found, (), self.beside)))


def planned_cuts(
    root: nn.Module,
    blocks: Mapping[str, Block],
    removed: Mapping[str, tuple[int, ...]],
    running: Mapping[str, tuple[int, ...]] | None = None,
) -> list[BlockCut]:
    """Work out every cut before one is made.

    Args:
        root: the model.
        blocks: what is cut, by path.
        removed: the heads of each that go.
        running: those of them in whose place a running mean stands.

    Raises:
        UnsupportedError: one of them cannot be made; it is named.
        ModelError: the model has changed since its heads were found.
    """
    swapped = replaced_while_running(root, blocks)
    if swapped is not None:
        raise UnsupportedError(
            f"{swapped}: the model put a {type(root.get_submodule(swapped)).__name__} there while it ran, in the place "
            "of the module that its class builds, and would do so again; a cut would be lost. Load it with a config "
            "that says what it runs as (BigBird: attention_type='original_full')"
        )
    cuts = []
    for path, block in blocks.items():
        means = set((running or {}).get(path, ()))
        if means:
            refuse_uneven_heads(root, block)
        carriers = carriers_of(root.get_submodule(path), block, means, set(removed[path]) - means)
        kept = kept_of(block, set(removed[path]) - set(carriers))
        slices = projection_slices(root, block, kept)
        refuse_shared(root, slices)
        extras = [] if bias_travels(root.get_submodule(path)) else extra_slices(root, block, kept)
        extras += _joint_norms(root, block, kept)
        taken = {one.path for one in (*slices, *extras)}
        rows = [one for one in row_slices(root, block, kept) if one.path not in taken]
        guesses = [one for one in guessed_slices(root, block, kept) if one.path not in {row.path for row in rows}]
        cuts.append(BlockCut(block, kept, tuple(slices), tuple(extras), tuple(rows), carriers, tuple(guesses)))
    return cuts


def _joint_norms(root: nn.Module, block: Block, kept: Kept) -> list[Slice]:
    """Slices of norms that run over all heads at once, where no head is left.

    Raises:
        UnsupportedError: heads are left, which such a norm would change.
    """
    widths = {block.query_heads * block.d_k, block.query_heads * block.d_v, block.kv_heads * block.d_k}
    widths -= {block.d_k, block.d_v}
    found: list[Slice] = []
    for name, part in root.get_submodule(block.module).named_children():
        weight = getattr(part, "weight", None)
        if "Norm" not in type(part).__name__ or not isinstance(weight, Tensor) or weight.ndim != 1:
            continue
        if weight.shape[0] not in widths or not any(word in name.lower() for word in _OF_HEADS):
            continue
        path = f"{block.module}.{name}" if block.module else name
        if kept.heads:
            raise UnsupportedError(
                f"{path}: {type(part).__name__} normalises over all heads at once, so a removed head would change the "
                "others; only all heads of the layer can go together"
            )
        found += [Slice(f"{path}.{one}", 0, ()) for one, _ in part.named_parameters()]
    return found


def cut_block(root: nn.Module, cut: BlockCut, truth: Truth, bound: float) -> HeadCut:
    """Make one cut in ``root``, and find how its module must be told of it.

    Raises:
        UnsupportedError: under no telling does the module compute what it computed with the heads gated; why not.
    """
    module = root.get_submodule(cut.block.module)
    before = _attribute_values(module)
    headed = truth.calls.headed.get(cut.block.module, ())
    # now: they are read off the module as it is before any of them
    ways = list(tellings(module, cut.block, cut.kept, cut.carriers, headed))
    lay_means(root, cut.block, cut.carriers)
    apply(root, cut.slices)
    whole = {one.path: _value(root, one.path) for one in cut.beside}
    reasons: list[str] = []
    for slices in cut.trials:
        for path, value in whole.items():
            _put(root, path, value)
            restate(root.get_submodule(path.rpartition(".")[0]))
        apply(root, slices)
        for telling in ways:
            _restore(module, before)
            install(module, telling)
            reason = _wrong(root, cut, truth, bound)
            if reason is None:
                return telling
            if reason not in reasons:
                reasons.append(reason)
    what = f"{len(cut.block.kv_map) - len(cut.kept.heads)} of its {cut.block.query_heads} heads cannot be cut out"
    if cut.carriers:
        what = f"running means cannot stand in the place of its heads {sorted(sum(cut.carriers.values(), ()))}"
    raise UnsupportedError(f"{cut.block.module} ({type(module).__name__}): {what}: {reasons[0]}")


def _wrong(root: nn.Module, cut: BlockCut, truth: Truth, bound: float) -> str | None:
    """What is wrong with one cut block on what entered it in the original, or None."""
    path, calls = cut.block.module, Calls()
    place = root.get_submodule(place_of(cut.block))
    try:
        with unchanged(root), replaced_inputs(root, {path: cut.block}, None, calls):
            for args, kwargs in truth.calls.inputs[path]:
                place(*copied(args), **copied(kwargs))
        if not cut.kept.heads:
            _run_eagerly(root, truth)
    except MODEL_FAILURES as failure:
        return f"its code does not run without them ({type(failure).__name__}: {failure})"
    expected, found = truth.calls.outputs[path], calls.outputs[path]
    if len(expected) != len(found):
        return "it runs another number of times"
    for left, right in zip(expected, found, strict=True):
        difference, largest = largest_difference([left], [right])
        if not difference <= bound * largest + (1e-9 if largest == 0 else 0.0):
            return f"its output would differ by {difference:.2g} from the gated one, where values reach {largest:.2g}"
    return None


def _run_eagerly(root: nn.Module, truth: Truth) -> None:
    """Run the model under eager attention, where the original runs so: it may be set to that later."""
    if truth.noise is None or holds_cache(truth.inputs):
        return
    with unchanged(root), eager(root):
        run_model(root, copied(truth.inputs))


def _attribute_values(module: nn.Module) -> dict[str, int]:
    return {name: value for name, value in vars(module).items() if type(value) is int}


def _restore(module: nn.Module, values: dict[str, int]) -> None:
    for name, value in values.items():
        if vars(module).get(name) != value:
            setattr(module, name, value)


def _value(root: nn.Module, path: str) -> object:
    owner, _, name = path.rpartition(".")
    return getattr(root.get_submodule(owner), name)


def _put(root: nn.Module, path: str, value: object) -> None:
    owner, _, name = path.rpartition(".")
    setattr(root.get_submodule(owner), name, value)
