"""What the config says about head counts, and whether the weights agree."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from torch import nn
from transformers import PretrainedConfig

from headwise.errors import ModelError
from headwise.layout import Block
from headwise.models.cut_modules import cut_of
from headwise.models.families.fields import field_of, layers_of, values_of

__all__ = ["check_counts", "check_groups", "nearest_config"]

_HEADS: Final = (
    "num_attention_heads",
    "n_head",
    "n_heads",
    "num_heads",
    "encoder_attention_heads",
    "decoder_attention_heads",
)
_KV_HEADS: Final = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "n_kv_heads")
_WIDTHS: Final = ("head_dim", "d_kv")


def check_groups(root: nn.Module) -> None:
    """Refuse a config whose query heads do not divide into its key-value heads.

    Raises:
        ModelError: both numbers are named.
    """
    from headwise.models.restore import configs_of

    for config in [layer for whole in configs_of(root) for layer in layers_of(whole)]:
        heads = _first(config, _HEADS[:4])
        kv_heads = _first(config, _KV_HEADS)
        if heads is not None and kv_heads is not None and (kv_heads[1] <= 0 or heads[1] % kv_heads[1]):
            raise ModelError(
                f"{type(config).__name__}: {heads[0]} {heads[1]} is not a multiple of {kv_heads[0]} {kv_heads[1]}; "
                "every key-value head must serve the same number of query heads"
            )


def check_counts(root: nn.Module, path: str, block: Block) -> None:
    """Compare the counts found in a forward pass with the config of the nearest module.

    A family may give different layers or stacks different counts; so a count is wrong only where no number that
    the config gives for heads equals it.

    Raises:
        ModelError: both numbers are named.
    """
    config = nearest_config(root, path)
    if config is None or cut_of(root.get_submodule(path)) is not None:
        return
    _compare(config, path, _HEADS, "query heads", block.query_heads)
    if _first(config, _KV_HEADS) is not None:
        _compare(config, path, (*_KV_HEADS, *_HEADS), "key-value heads", block.kv_heads)


def _compare(config: PretrainedConfig, path: str, names: tuple[str, ...], what: str, seen: int) -> None:
    stated = _first(config, names)
    if stated is None or seen in _numbers(config, "head") or (seen == 1 and getattr(config, "multi_query", False)):
        return
    raise ModelError(
        f"{path}: the weights have {seen} {what}, but {type(config).__name__} says {stated[0]} = {stated[1]}; "
        "correct the config, or load the weights that belong to it"
    )


def _first(config: PretrainedConfig, names: tuple[str, ...]) -> tuple[str, int] | None:
    return next(((name, value) for name in names if (value := field_of(config, name, kind=int)) is not None), None)


def _numbers(config: PretrainedConfig, word: str) -> set[int]:
    """Every whole number that the config, or a config inside it, gives under a name with ``word`` in it."""
    found: set[int] = set()
    for name, value in vars(config).items():
        if isinstance(value, PretrainedConfig):
            found |= _numbers(value, word)
        elif word in name:
            found |= set(_flat(value))
    for name in _HEADS + _KV_HEADS:
        found |= set(_flat(values_of(config, name)))
    return found


def _flat(value: Any) -> Iterator[int]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for part in value:
            yield from _flat(part)
    elif isinstance(value, int) and not isinstance(value, bool):
        yield value


def nearest_config(root: nn.Module, path: str) -> PretrainedConfig | None:
    """The config of the module at ``path``, or of the nearest module around it that has one."""
    parts = path.split(".")
    for length in range(len(parts), -1, -1):
        config = getattr(root.get_submodule(".".join(parts[:length])), "config", None)
        if isinstance(config, PretrainedConfig):
            return config
    return None
