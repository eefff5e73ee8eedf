"""What a reader of the ledger must know: where what runs is not, or not quite, what is counted."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Any, Final

from torch import nn

from headwise.costs import AttentionNumbers
from headwise.models.static import attention_on_seam
from headwise.verbs.cost_attention import Found, is_matrix, is_stateful, matrix_in

__all__ = ["differences", "in_code_of_its_own", "outside_layers"]

#: Attention whose products are not queries x keys and weights x values over the whole rectangle, by class.
OTHER_PRODUCTS: Final = {
    "CanineSelfAttention": "attends in chunks, and between characters and molecules of other lengths",
    "LEDEncoderSelfAttention": "attends in padded blocks of its window",
    "LongformerSelfAttention": "attends in padded blocks of its window",
    "LongT5LocalAttention": "attends in padded blocks of its window",
    "LongT5TransientGlobalAttention": "attends in padded blocks of its window and to summaries of blocks",
    "MraSelfAttention": "approximates its pattern in blocks of several sizes",
    "PegasusXGlobalLocalAttention": "attends in padded blocks and through global tokens",
    "ProphetNetNgramSelfAttention": "attends once for each predicted n-gram, with products over relative positions",
    "FastSpeech2ConformerAttention": "also multiplies queries with relative positions",
    "VitsAttention": "also multiplies queries and weights with relative positions",
}
#: What else is counted otherwise than it runs, by class.
OTHERWISE: Final = {
    "T5Gemma2MergedAttention": "attends to its own and to the encoder's positions at once; only its own are counted",
    "LukeSelfAttention": "has queries for entities beside those for words; every token is counted through all of them",
    "HiggsAudioV2DecoderLayer": "has an MLP for text and one for audio; every token is counted through both",
}


def differences(root: nn.Module, found: Sequence[Found]) -> list[str]:
    """Name what runs otherwise than it is counted, whether the model is in memory or not."""
    return [*_choosing_keys(root), *_other_products(root), *_every_expert(root), *_not_understood(root, found)]


def _other_products(root: nn.Module) -> list[str]:
    """Name attention that multiplies something else than what is counted, live or not."""
    kinds = dict.fromkeys(type(part).__name__ for part in root.modules())
    return [
        f"{name} {OTHER_PRODUCTS[name]}: counted are queries x keys and weights x values over the whole rectangle"
        for name in kinds
        if name in OTHER_PRODUCTS
    ] + [f"{name} {OTHERWISE[name]}" for name in kinds if name in OTHERWISE]


def _not_understood(root: nn.Module, found: Sequence[Found]) -> list[str]:
    """Name modules called attention whose projections are not understood, and which keep no state of constant size."""
    known = [one.path for one in found]
    counts: dict[str, int] = {}
    for path, module in root.named_modules():
        name = type(module).__name__
        if "attention" not in name.lower() or is_stateful(module) or any(_within(path, one) for one in known):
            continue
        if sum(is_matrix(matrix_in(child)) for child in module.children()) > 1:
            counts[name] = counts.get(name, 0) + 1
    return [
        f"{count} x {name}: attention that is not understood: its scores and mixing are not counted"
        for name, count in counts.items()
    ]


def _every_expert(root: nn.Module) -> list[str]:
    """Name experts that are handed no choice of the router, so that all of them multiply every token (Llama 4)."""
    kinds: dict[str, Any] = {
        type(part).__name__: type(part)
        for path, part in root.named_modules()
        if path.rpartition(".")[2] == "experts" and not isinstance(part, nn.ModuleList)
    }
    return [
        f"{name} multiplies every token by every expert; counted are only those that the router picks"
        for name, kind in kinds.items()
        if len(inspect.signature(kind.forward).parameters) == 2
    ]


def outside_layers(paths: Iterable[str]) -> list[str]:
    """Name the matrices that stand outside the layers: an input may reach them at no or at one position."""
    outside = [path for path in paths if not any(part.isdigit() for part in path.split("."))]
    shown = ", ".join(outside[:4]) + (f" and {len(outside) - 4} more" if len(outside) > 4 else "")
    return [f"counted at every position, though an input need not reach it there: {shown}"] if outside else []


def in_code_of_its_own(root: nn.Module, sites: Sequence[AttentionNumbers]) -> list[str]:
    """Say which attention is not what transformers' interface calls, where no forward pass has shown what it does."""
    seam = attention_on_seam(root)
    kinds: dict[str, bool] = {}
    for site in sites:
        module = root.get_submodule(site.block)
        if isinstance(module, nn.MultiheadAttention) or any(_within(site.block, path) for path in seam):
            continue
        kinds[type(module).__name__] = site.relative is not None
    return [
        f"{name} computes its attention in code of its own: its heads are read from the shapes of the weights alone"
        + ("" if known else ", and products beyond queries x keys and weights x values are not counted")
        for name, known in kinds.items()
    ]


def _choosing_keys(root: nn.Module) -> list[str]:
    """Name what chooses the keys that a query reads (DeepSeek-V3.2's indexer)."""
    kinds = dict.fromkeys(type(part).__name__ for part in root.modules() if type(part).__name__.endswith("Indexer"))
    return [
        f"{name} chooses the keys that are read: its scores are not counted, and heads are counted over all visible "
        "keys"
        for name in kinds
    ]


def _within(path: str, other: str) -> bool:
    return path == other or path.startswith(other + ".") or other.startswith(path + ".")
