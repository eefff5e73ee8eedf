"""The multi-head attention layer and what belongs to it: cache, rotary positions, interchange, tensor parallelism.

``HeadParallel`` and ``split_heads`` are loaded when they are first used, because they need torch.distributed.
"""

from typing import TYPE_CHECKING, Any

from headwise.nn.attention import MultiHeadAttention as MultiHeadAttention
from headwise.nn.cache import KVCache as KVCache
from headwise.nn.heads import HeadView as HeadView
from headwise.nn.interchange import from_torch as from_torch
from headwise.nn.interchange import to_torch as to_torch
from headwise.nn.rotary import Rotary as Rotary
from headwise.nn.rotary import token_positions as token_positions
from headwise.nn.transformers_modules import from_transformers as from_transformers
from headwise.nn.transformers_modules import to_transformers as to_transformers

if TYPE_CHECKING:
    from headwise.nn.parallel import HeadParallel as HeadParallel
    from headwise.nn.parallel import split_heads as split_heads


def __getattr__(name: str) -> Any:
    """Load the names that need torch.distributed when they are first used."""
    if name in ("HeadParallel", "split_heads"):
        from headwise.nn import parallel

        return getattr(parallel, name)
    raise AttributeError(f"module 'headwise.nn' has no attribute {name!r}")
