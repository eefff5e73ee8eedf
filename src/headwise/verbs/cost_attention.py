"""Where the attention of a model is: modules with projections of queries, keys and values and of the heads' outputs.

Nothing runs: a model on the meta device, without any weights in memory, is searched like any other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from torch import Tensor, nn

__all__ = ["Found", "find_attention", "is_matrix", "is_stateful", "matrix_in", "nearest_config", "widths"]

#: Names of separate projections of queries, keys and values in one module.
SEPARATE: Final[tuple[tuple[str, str, str], ...]] = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("q", "k", "v"),
    ("q_lin", "k_lin", "v_lin"),
    ("query_proj", "key_proj", "value_proj"),
    ("q_linear", "k_linear", "v_linear"),
    ("linear_q", "linear_k", "linear_v"),
    ("wq", "wk", "wv"),
    ("Wq", "Wk", "Wv"),
    ("to_q", "to_k", "to_v"),
)
#: Names of one projection for all three.
FUSED: Final = ("query_key_value", "qkv_proj", "qkv", "Wqkv", "c_attn", "att_proj", "in_proj", "W_pack")
#: Names that other modules use as well, so that the class must be called attention.
SHARED_NAMES: Final = ("in_proj",)
#: Signs of layers that keep a state of constant size instead of keys and values.
STATEFUL_WEIGHTS: Final = ("A_log", "dt_bias")
STATEFUL_CLASSES: Final = ("linearattention", "lightning", "deltanet", "mamba", "rwkv", "retention", "recurrent")
STATEFUL_CHILDREN: Final = ("conv1d", "forget_gate")
#: Names of what multiplies the concatenated heads.
OUTPUT: Final = (
    "o_proj",
    "out_proj",
    "c_proj",
    "dense",
    "o",
    "out_lin",
    "wo",
    "Wo",
    "proj",
    "projection",
    "projection_layer",
    "linear_out",
    "output_proj",
    "out",
)


@dataclass
class Found:
    """The parts of one attention module.

    Attributes:
        path: dotted path of the module that holds the projections of queries, keys and values.
        module: that module.
        config: the nearest config above it.
        separate: projections of q, k and v, where they are separate.
        fused: the projection of all three (or of k and v, beside ``separate["q"]``), or None.
        output: what multiplies the concatenated heads.
        outside: whether ``output`` sits outside ``module`` (BERT).
    """

    path: str
    module: nn.Module
    config: Any
    separate: dict[str, nn.Module] = field(default_factory=dict)
    fused: nn.Module | None = None
    output: nn.Module | None = None
    outside: bool = False


def is_matrix(module: nn.Module | None) -> bool:
    """Whether a module multiplies by a matrix: ``nn.Linear``, or GPT-2's ``Conv1D``."""
    weight = getattr(module, "weight", None)
    return (
        isinstance(weight, Tensor)
        and weight.ndim == 2
        and (isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D")
    )


def matrix_in(module: nn.Module) -> nn.Module:
    """The matrix that a module does nothing but clip or convert around (Gemma 4's towers), else the module itself."""
    children = dict(module.named_children())
    inner = children.get("linear")
    if inner is None or len(children) > 1 or module._parameters or not is_matrix(inner):
        return module
    return inner


def widths(module: nn.Module) -> tuple[int, int]:
    """Width in, width out."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    first, second = weight.shape
    return (int(first), int(second)) if type(module).__name__ == "Conv1D" else (int(second), int(first))


def find_attention(root: nn.Module) -> Iterator[Found]:
    """Every attention module of a model, in the order in which modules are registered."""
    config = getattr(root, "config", None)
    for path, module in root.named_modules():
        if is_stateful(module):
            continue
        if isinstance(module, nn.MultiheadAttention) and module.in_proj_weight is not None:
            yield Found(path, module, nearest_config(root, path) or config, output=module.out_proj)
            continue
        children = {name: matrix_in(child) for name, child in module.named_children()}
        found = Found(path, module, nearest_config(root, path) or config)
        separate = next((names for names in SEPARATE if _fits(children, names)), None)
        if separate is not None:
            parts = zip("qkv", separate, strict=True)
            found.separate = {part: children[name] for part, name in parts if name in children}
        elif is_matrix(children.get("kv_a_proj_with_mqa")) and is_matrix(children.get("kv_b_proj")):
            query = children.get("q_proj") or children.get("q_b_proj")
            if query is None:
                continue
            found.separate = {"q": query}
        else:
            found.fused = _fused_of(module, children)
            if found.fused is None:
                continue
            if is_matrix(children.get("q_attn")):
                found.separate = {"q": children["q_attn"]}
        found.output, found.outside = _output(root, path, children, found)
        if found.output is not None:
            yield found


def is_stateful(module: nn.Module) -> bool:
    """Whether a module mixes positions through a state of constant size (linear attention, state spaces)."""
    own = dict(module.named_parameters(recurse=False))
    children = dict(module.named_children())
    if any(name in own for name in STATEFUL_WEIGHTS) or any(name in children for name in STATEFUL_CHILDREN):
        return True
    # What scales scores takes a softmax of them, whatever it is called.
    named = any(word in type(module).__name__.lower() for word in STATEFUL_CLASSES)
    return named and not hasattr(module, "scaling")


def _fits(children: dict[str, nn.Module], names: tuple[str, str, str]) -> bool:
    return is_matrix(children.get(names[0])) and any(is_matrix(children.get(name)) for name in names[1:])


def _fused_of(module: nn.Module, children: dict[str, nn.Module]) -> nn.Module | None:
    called = "att" in type(module).__name__.lower()
    names = (name for name in FUSED if called or name not in SHARED_NAMES)
    return next((children[name] for name in names if is_matrix(children.get(name))), None)


def _output(root: nn.Module, path: str, children: dict[str, nn.Module], found: Found) -> tuple[nn.Module | None, bool]:
    taken = {id(found.fused), *(id(part) for part in found.separate.values())}
    for name in OUTPUT:
        child = children.get(name)
        if isinstance(child, (nn.Sequential, nn.ModuleList)) and len(child):
            child = child[0]
        if is_matrix(child) and id(child) not in taken:
            return child, False
    if "." in path:
        sibling = getattr(root.get_submodule(path.rpartition(".")[0]), "output", None)
        for outside in (sibling, getattr(sibling, "dense", None)):
            if is_matrix(outside):
                return outside, True
    return None, False


def nearest_config(root: nn.Module, path: str) -> Any:
    """The config of the module at ``path`` or of the nearest one above it, or None."""
    parts = path.split(".")
    for length in range(len(parts), -1, -1):
        config = getattr(root.get_submodule(".".join(parts[:length])), "config", None)
        if config is not None:
            return config
    return None
