"""Whether a plan gives a checkpoint that transformers loads by itself, and by which repair: found before the cut."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from headwise.errors import InputError, UnsupportedError
from headwise.layout import HeadLayout
from headwise.models.handle import Model
from headwise.models.stock import recounted
from headwise.models.switches import built, lacks_bias, shapes_of, switch_for
from headwise.surgery.averaging import carriers_of
from headwise.surgery.cutting import BlockCut, planned_cuts
from headwise.surgery.keeping import Kept, kept_of
from headwise.surgery.repair import INTERCEPTS
from headwise.surgery.request import Request

__all__ = ["stock_repair"]


def stock_repair(model: Model, request: Request, repair: str | None) -> tuple[str, str | None]:
    """The repair under which a stock checkpoint can say the cut, and why it is not the usual one.

    Args:
        model: the model before.
        request: what is to go.
        repair: the repair that was asked for; None: the best that a stock checkpoint can say.

    Returns:
        The repair; and where it is another than ``"least_squares"`` because of the checkpoint, a sentence that says so.

    Raises:
        InputError: the layers or groups would keep different numbers of heads.
        UnsupportedError: the family does not take the counts, or has no place for the intercept of ``repair``.
    """
    root, layout, config = model.module, model.layout, model.config
    kept = _uniform(root, layout, request)
    first = next(iter(kept))
    block = layout.blocks[first]
    if config is None or not hasattr(config, "to_dict"):
        raise UnsupportedError(f"{type(root).__name__} has no config of transformers', so it has no stock checkpoint")
    removed = {path: request.removed.get(path, ()) for path in layout.blocks}
    cuts = planned_cuts(root, layout.blocks, removed, request.running)
    shapes, guesses = _shapes(root, cuts)
    counts = (block.query_heads, len(kept[first].heads), len(kept[first].kv), block.d_k)
    why, taken = "its config does not take other counts", []
    for changed, _ in recounted(config, *counts):
        fresh = built(root, changed)
        if isinstance(fresh, str):
            why = fresh
            continue
        theirs = shapes_of(fresh)
        found = _settled(shapes, guesses, theirs)
        if found == theirs or switch_for(root, found, changed):  # an earlier repair left biases in some layers
            taken.append((changed, found))
        else:
            why = _differs(found, theirs, changed)
    if not taken:
        raise UnsupportedError(
            f"stock: a checkpoint of plain transformers cannot say this plan: {why}; leave stock out (--stock), "
            "which saves a folder that hw.load reads"
        )
    wanted = {name: width for name, width in _intercepts(root, cuts) if lacks_bias(root, name)}
    if not wanted or any(switch_for(root, {**one, **wanted}, changed) for changed, one in taken):
        return repair or "least_squares", None
    where = f"{type(config).__name__} builds no {next(iter(wanted))}"
    if request.constant:
        raise UnsupportedError(
            f"stock: heads that are replaced by a constant add an intercept, and {where}; make the plan with the "
            "replacement 'nothing' (--replacement nothing), or leave stock out (--stock)"
        )
    if repair in INTERCEPTS:
        raise UnsupportedError(
            f"stock: repair={repair!r} adds an intercept, and {where}; take repair='least_squares_no_bias' "
            "(--repair least_squares_no_bias) or 'none', or leave repair out"
        )
    if repair is not None:
        return repair, None
    return "least_squares_no_bias", f"the repair has no intercept, so that the checkpoint is a stock one: {where}"


def _uniform(root: nn.Module, layout: HeadLayout, request: Request) -> dict[str, Kept]:
    kept = {}
    for path, block in layout.blocks.items():
        running = set(request.running.get(path, ()))
        gone = set(request.removed.get(path, ()))
        carriers = carriers_of(root.get_submodule(path), block, running, gone - running)
        kept[path] = kept_of(block, gone - set(carriers))
    todo = "make the plan with uniform=True (headwise plan --uniform), or leave stock out (--stock)"
    first, one = next(iter(kept.items()))
    for path, other in kept.items():
        if len(other.heads) != len(one.heads):
            raise InputError(
                f"stock: a checkpoint of plain transformers has the same number of heads in every layer, and the plan "
                f"leaves {len(one.heads)} in {first} and {len(other.heads)} in {path}; {todo}"
            )
        if not other.even or len(other.kv) != len(one.kv):
            raise InputError(
                f"stock: a checkpoint of plain transformers has as many query heads for every key-value head, and the "
                f"plan leaves {len(other.heads)} for {len(other.kv)} in {path}, unevenly; {todo}"
            )
    if not one.heads:
        raise InputError(f"stock: the plan leaves no head, and a checkpoint of plain transformers has some; {todo}")
    return kept


def _shapes(root: nn.Module, cuts: list[BlockCut]) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """Shapes after the cut: of everything, and of what may turn out to have been cut as well."""
    named: dict[int, list[str]] = {}
    for name, value in root.state_dict(keep_vars=True).items():
        named.setdefault(id(value), []).append(name)
    shapes = shapes_of(root)
    guesses: dict[str, tuple[int, ...]] = {}
    for cut in cuts:
        for into, slices in ((shapes, cut.slices), (guesses, cut.beside)):
            for one in slices:
                owner, _, last = one.path.rpartition(".")
                for name in named.get(id(getattr(root.get_submodule(owner), last)), ()):
                    shape = list(into.get(name, shapes[name]))
                    shape[one.axis] = len(one.keep)
                    into[name] = tuple(shape)
    return shapes, guesses


def _settled(
    shapes: Mapping[str, tuple[int, ...]], guesses: Mapping[str, tuple[int, ...]], theirs: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """The shapes after the cut, with those of the guesses that the class builds as well."""
    return {
        name: guesses[name] if name in guesses and theirs.get(name) == guesses[name] else shape
        for name, shape in shapes.items()
    }


def _differs(settled: Mapping[str, tuple[int, ...]], theirs: Mapping[str, tuple[int, ...]], config: Any) -> str:
    """What the class builds otherwise."""
    name = next(name for name in (*settled, *theirs) if settled.get(name) != theirs.get(name))
    return f"{name} would be {settled.get(name)}, and is {theirs.get(name)} in what {type(config).__name__} builds"


def _intercepts(root: nn.Module, cuts: list[BlockCut]) -> list[tuple[str, tuple[int]]]:
    """Name and shape of the bias of every output projection."""
    found = []
    for cut in cuts:
        assert cut.block.o is not None
        owner: Any = root.get_submodule(cut.block.o.parameter)
        found.append((f"{cut.block.o.parameter}.bias", (int(owner.weight.shape[int(cut.block.o.transposed)]),)))
    return found
