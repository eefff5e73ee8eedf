"""Reading a config's fields, also where they differ from layer to layer.

Gemma 4 and others give a field such as ``head_dim`` layer by layer: transformers then refuses to read it from the
model's config, and gives it in the config of each layer (``config.per_layer_config[i]``).
"""

from __future__ import annotations

from typing import Any

__all__ = ["field_of", "layers_of", "values_of"]


def layers_of(config: Any) -> tuple[Any, ...]:
    """The configs of the layers where they differ, otherwise the config itself."""
    if getattr(config, "is_heterogeneous", False) is True:
        return tuple(config.per_layer_config)
    return (config,)


def values_of(config: Any, name: str) -> tuple[Any, ...]:
    """What a config says under ``name``: nothing, one value, or the different ones that its layers have, in order.

    >>> from transformers import GPT2Config
    >>> values_of(GPT2Config(n_head=3), "n_head"), values_of(GPT2Config(), "head_dim")
    ((3,), ())
    """
    found: list[Any] = []
    for layer in layers_of(config):
        value = getattr(layer, name, None)
        if value is not None and value not in found:
            found.append(value)
    return tuple(found)


def field_of(config: Any, *names: str, kind: type | tuple[type, ...] = object) -> Any:
    """The value of the first of ``names`` that the config gives as a ``kind``; None where it gives none of them.

    Where layers differ, the largest of their numbers (a size that is enough for all of them), or else the first value.
    True and False are no numbers.

    >>> from transformers import GPT2Config
    >>> field_of(GPT2Config(n_head=3), "num_heads", "n_head", kind=int)
    3
    """
    for name in names:
        values: list[Any] = [
            value
            for value in values_of(config, name)
            if isinstance(value, kind) and (kind is object or not isinstance(value, bool))
        ]
        if values:
            numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
            return max(numbers) if len(numbers) == len(values) else values[0]
    return None
