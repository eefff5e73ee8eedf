"""What is known of a model: its layout, and how the seam must treat it. Found once, remembered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from headwise.errors import ModelError
from headwise.layout import Block, HeadLayout, Projection
from headwise.models.restore import ordinary
from headwise.models.standin import MaskMode
from headwise.models.torch_seam.heads import Heads

__all__ = ["Discovered", "discover", "discovered", "forget", "output_weight"]


@dataclass(frozen=True)
class Discovered:
    """A model's heads and how its seam works.

    Attributes:
        layout: the heads.
        attention: the attention modules by path.
        masks: whether masks reach the seam as descriptions (``"compact"``) or whole (``"dense"``).
        own_output: whether the model needs what its own attention function returns beside the output.
        direct: attention modules that call torch's functions instead of transformers' interface, by path, and where
            their tensors have the heads (see :class:`~headwise.models.torch_seam.Heads`).
    """

    layout: HeadLayout
    attention: dict[str, nn.Module]
    masks: MaskMode
    own_output: bool
    direct: Mapping[str, Mapping[int, Heads]] = field(default_factory=dict)


_KNOWN: WeakKeyDictionary[nn.Module, Discovered] = WeakKeyDictionary()


def discovered(module: nn.Module, example: Mapping[str, Any] | None = None) -> Discovered:
    """What is known of ``module``; probes it with ``example`` (or one made for it) the first time."""
    from headwise.models.discovery import probe_model

    known = _KNOWN.get(module)
    if known is None:
        with ordinary(module):
            known = _KNOWN[module] = probe_model(module, example)
    return known


def discover(module: nn.Module, example: Mapping[str, Tensor] | None = None) -> HeadLayout:
    """Find every attention head of a model by running it once on a small input.

    The run is in eval mode without gradients and leaves nothing behind. Each attention call is computed twice, by
    the model's own function and by headwise, and both must agree, so that a rule for the scores that headwise does
    not see can never go unnoticed.

    Args:
        module: a transformers model.
        example: keyword arguments of a small forward pass; None makes them for the family. Give two rows or more
            and, for an encoder-decoder model, two different lengths. Passing an example discovers the model anew.

    Returns:
        The layout: sites in the order in which a forward pass meets them, and their blocks.

    Raises:
        UnsupportedError: no attention on the seam, or attention that is not understood; what was looked for is listed.
        ModelError: the weights and the config disagree about the heads.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=4, n_embd=16, vocab_size=31))
        >>> layout = discover(gpt2)
        >>> [(site.key.module, site.causal) for site in layout.sites]
        [('transformer.h.0.attn', True), ('transformer.h.1.attn', True)]
        >>> len(layout)
        8
    """
    if example is not None:
        forget(module)
    return discovered(module, example).layout


def forget(module: nn.Module) -> None:
    """Forget what was discovered about ``module``, because its heads have changed."""
    _KNOWN.pop(module, None)


def output_weight(module: nn.Module, block: Block) -> Tensor:
    """W_O of every head of a block: (H, D_v, E), a view of the weight. ``z_h @ output_weight[h]`` is the head's result.

    Args:
        module: the model in which ``block`` was discovered.
        block: a block whose ``o`` is known.

    Raises:
        ModelError: the block has no known output projection; the reason is named.
    """
    projection: Projection | None = block.o
    if projection is None:
        reason = dict(block.unknown).get("o", "it was not found")
        raise ModelError(f"{block.module}: the output projection of its heads is not known: {reason}")
    weight = module.get_submodule(projection.parameter).weight
    assert isinstance(weight, Tensor)
    matrix_DE = weight if projection.transposed else weight.T
    if matrix_DE.shape[0] != block.query_heads * block.d_v:
        raise ModelError(
            f"{projection.parameter}: its input has width {matrix_DE.shape[0]}, but {block.query_heads} heads "
            f"of width {block.d_v} were discovered; the model has changed: discover it again"
        )
    return matrix_DE.view(block.query_heads, block.d_v, matrix_DE.shape[1])
