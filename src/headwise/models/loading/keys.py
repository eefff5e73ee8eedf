"""Weights that are missing or left over: what may be, and what would measure another model.

The rules, by the part of the model that a name belongs to:

* *missing* (the model has it, the checkpoint does not, so it would be random): allowed only for the small projection
  behind ``pooler`` (``pooler.dense`` and the like), whose output no attention reads; for the embedding that stands in
  for masked input in training (``masked_spec_embed``, ``mask_token``); and for buffers that are computed, not
  learned. Where only the head of a task is missing (a classifier, a language model's output), the model below it is
  used instead, and a note says so.
* *left over* (the checkpoint has it, the model does not): allowed for other tasks' heads, poolers and old computed
  buffers. Refused inside the body of the model: a layer or a bias that is not used means that config and weights
  disagree.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from torch import nn

from headwise.errors import ModelError, UnsupportedError

__all__ = ["Verdict", "judge"]

_POOLER: Final = re.compile(r"(^|\.)pooler\.(dense\.|activation\.)?(weight|bias)$")
_MASKING: Final = re.compile(r"(^|\.)(masked_spec_embed|mask_token)$")
_COMPUTED: Final = re.compile(
    r"(^|\.)(position_ids|token_type_ids|inv_freq|original_inv_freq|num_batches_tracked|masked_bias|final_logits_bias|version"
    r"|rotary_emb\.[\w.]+|embed_positions\.(weights|_float_tensor)|(attn|attention)\.bias)$"
)


@dataclass(frozen=True)
class Verdict:
    """What a load may be used as.

    Attributes:
        body_only: only the model below the task head has all its weights.
        random: names of parameters that the checkpoint did not have; nothing that is measured reads them.
        notes: one sentence each.
    """

    body_only: bool = False
    random: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()


def judge(
    module: nn.Module,
    missing: Collection[str],
    unexpected: Collection[str],
    where: str,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    strict: bool,
) -> Verdict:
    """Decide about the names that ``from_pretrained`` reported.

    Raises:
        ModelError: a weight that the forward pass uses is missing, or the body of the model has no place for one that
            is there.
    """
    notes: list[str] = []
    body, prefix = _body(module)
    _left_over(body, prefix, unexpected, where, shapes, strict, notes)
    needed = sorted(name for name in missing if not _COMPUTED.search(name))
    outside = [name for name in needed if prefix and not name.startswith(prefix)]
    inside = [name for name in needed if name not in outside]
    random = [name for name in inside if _POOLER.search(name) or _MASKING.search(name)]
    lost = [name for name in inside if name not in random]
    if lost:
        raise ModelError(
            f"{where}: the checkpoint lacks {_some(lost)}, which {type(module).__name__} needs, so it would be "
            "random; give the "
            f"complete checkpoint, or correct the config"
        )
    if outside:
        notes.append(
            f"the checkpoint has no weights for the head of {type(module).__name__} ({_some(outside)}); its body, "
            f"{type(body).__name__}, is used without the head"
        )
        random = [name.removeprefix(prefix) for name in random]
    elif any(_POOLER.search(name) for name in random) and module is not body:
        raise ModelError(
            f"{where}: the checkpoint lacks {_some(random)}, which the head of {type(module).__name__} reads, so "
            "it would be "
            f"random; give the complete checkpoint, or correct the config"
        )
    if random:
        notes.append(
            f"the checkpoint lacks {_some(random)}; no attention reads it, so it stays random and counts nowhere"
        )
    return Verdict(bool(outside), frozenset(random), tuple(notes))


def _body(module: nn.Module) -> tuple[nn.Module, str]:
    """The model below the task head, and its path with a dot; the module itself and "" where there is no head."""
    prefix = getattr(module, "base_model_prefix", "")
    body = getattr(module, prefix, None) if prefix else None
    return (body, f"{prefix}.") if isinstance(body, nn.Module) else (module, "")


def _left_over(
    body: nn.Module,
    prefix: str,
    unexpected: Collection[str],
    where: str,
    shapes: Mapping[str, tuple[int, ...]],
    strict: bool,
    notes: list[str],
) -> None:
    lora = sorted(name for name in unexpected if ".lora_" in name or ".base_layer." in name)
    if lora:
        raise UnsupportedError(
            f"{where}: the checkpoint holds an adapter that is not merged ({lora[0]}); merge it "
            "(merge_and_unload()) and save again"
        )
    parts = {name for name, _ in body.named_children()} | {name for name, _ in body.named_parameters(recurse=False)}
    own = getattr(body, "base_model_prefix", "")
    foreign, odd = [], []
    for name in sorted(unexpected):
        short = name.removeprefix(prefix).removeprefix(f"{own}." if own else "")
        inside = short.split(".")[0] in parts or (prefix and name.startswith(prefix))
        computed = _COMPUTED.search(name) and len(shapes.get(name, (1, 1, 1, 1))) != 1
        if _POOLER.search(name) or _MASKING.search(name) or not inside:
            foreign.append(name)
        elif not computed:
            odd.append(name)
    if odd and strict:
        raise ModelError(
            f"{where}: the checkpoint holds {_some(odd)}, for which the {type(body).__name__} built from its "
            "config has no place; "
            "config and weights disagree: correct the config (number of layers, biases), or pass strict=False to "
            "leave it out"
        )
    if odd:
        notes.append(f"left out, because the model built from the config has no place for it: {_some(odd)}")
    if foreign:
        notes.append(f"the checkpoint also holds {_some(foreign)}, which this model does not use")


def _some(names: Collection[str]) -> str:
    shown = ", ".join(sorted(names)[:3])
    return shown + (f" and {len(names) - 3} more" if len(names) > 3 else "")
