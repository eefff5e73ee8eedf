"""Tensor parallelism: the heads of a layer split over ranks, with PyTorch's own DTensor.

The plan is that of Megatron-LM (Shoeybi et al. 2019, section 3): W_Q, W_K, W_V column-wise, W_O row-wise, one
all-reduce of the output forward and one of the input's gradient backward. A head stays whole on one rank, and a
key-value head stays with the query heads that read it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from headwise.errors import InputError
from headwise.kernels.problem import Rows
from headwise.nn.attention import MultiHeadAttention

__all__ = ["HeadParallel", "HeadShard", "split_heads"]

Gathered = TypeVar("Gathered", Tensor, None, Tensor | None)

#: Along which axis each parameter is cut; those not named are whole on every rank.
CUT = {"W_Q": 1, "W_K": 1, "W_V": 1, "W_O": 0, "b_Q": 0, "b_K": 0, "b_V": 0, "sinks": 0}


@dataclass(frozen=True)
class HeadShard:
    """This rank's share of the heads of a layer, and how tensors come in and go out."""

    mesh: DeviceMesh

    @property
    def size(self) -> int:
        """Ranks that share the heads."""
        return self.mesh.size()

    def heads(self, count: int) -> range:
        """The heads, of ``count``, that this rank holds."""
        each = count // self.size
        start = self.mesh.get_local_rank() * each
        return range(start, start + each)

    def local(self, parameter: Tensor) -> Tensor:
        """This rank's part as a plain tensor; the gradient of a whole one is summed over ranks where it is shared."""
        return parameter.to_local() if isinstance(parameter, DTensor) else parameter

    def enter(self, x: Tensor) -> Tensor:
        """The same tensor on every rank; backward adds up what each rank's heads contribute to its gradient."""
        if not isinstance(x, DTensor):
            x = DTensor.from_local(x, self.mesh, [Replicate()], run_check=False)
        return x.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])

    def leave(self, part: Tensor) -> Tensor:
        """The sum of every rank's part, on every rank."""
        return DTensor.from_local(part, self.mesh, [Partial()], run_check=False).full_tensor()

    def gather(self, part: Gathered) -> Gathered:
        """All heads of a (B, H, ...) tensor on every rank."""
        if part is None:
            return part
        return DTensor.from_local(part.contiguous(), self.mesh, [Shard(1)], run_check=False).full_tensor()

    def gather_rows(self, rows: Rows | None) -> Rows | None:
        """The statistics of all heads on every rank."""
        if rows is None:
            return None
        held = {f.name: getattr(rows, f.name) for f in fields(rows)}
        whole: dict[str, Any] = {name: self.gather(part) for name, part in held.items() if part is not None}
        return replace(rows, **whole)


class HeadParallel(ParallelStyle):
    """The layer's entry in a plan of ``torch.distributed.tensor.parallel.parallelize_module``.

    The layer still takes and gives whole tensors on every rank, and its parameters become DTensors. A cache made
    with ``layer.new_cache`` afterwards holds this rank's key-value heads alone.

    Raises:
        InputError: not a :class:`MultiHeadAttention`; heads or key-value heads that the ranks do not divide; a summed
            softmax, which needs all heads at once; a mesh of more than one dimension.

    Example:
        ``parallelize_module(model, mesh, {"layers.*.attention": HeadParallel()})``
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _check(module, device_mesh)
        assert isinstance(module, MultiHeadAttention)
        cut = {name: axis for name, axis in CUT.items() if name != "W_O" or module.combine == "concat"}
        for name, parameter in list(module.named_parameters(recurse=False)):
            placement: Placement = Shard(cut[name]) if name in cut else Replicate()
            whole = distribute_tensor(parameter.data, device_mesh, [placement])
            split = nn.Parameter(whole, requires_grad=parameter.requires_grad)
            if name not in cut and name != "b_O" and parameter.requires_grad:
                split.register_hook(_summed_over_ranks)  # type: ignore[no-untyped-call]
            module.register_parameter(name, split)
        module._shard = HeadShard(device_mesh)
        return module


def split_heads(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Split the heads of every :class:`MultiHeadAttention` in ``model`` (or of the layer itself) over the mesh.

    Nothing is changed unless every layer can be split.

    Returns:
        The model itself.

    Raises:
        InputError: see :class:`HeadParallel`, or a model without such a layer.
    """
    layers = [module for module in model.modules() if isinstance(module, MultiHeadAttention)]
    if not layers:
        raise InputError(f"{type(model).__name__} holds no headwise MultiHeadAttention whose heads could be split.")
    for layer in layers:
        _check(layer, mesh)
    for layer in layers:
        HeadParallel()._apply(layer, mesh)
    return model


def _summed_over_ranks(gradient: Tensor) -> Tensor:
    """The gradient of a parameter that every rank uses with its own heads."""
    assert isinstance(gradient, DTensor)
    part = DTensor.from_local(gradient.to_local(), gradient.device_mesh, [Partial()], run_check=False)
    return part.redistribute(placements=[Replicate()])


def _check(module: nn.Module, mesh: DeviceMesh) -> None:
    """Refuse what cannot be split, before anything is."""
    if not isinstance(module, MultiHeadAttention):
        raise InputError(f"HeadParallel splits headwise MultiHeadAttention layers, not {type(module).__name__}.")
    if mesh.ndim != 1:
        raise InputError(
            f"Heads are split over a mesh of one dimension, but this one has {mesh.ndim}. Give mesh['tp']."
        )
    if module._shard is not None:
        raise InputError("The layer's heads are split over ranks already.")
    if module.softmax == "summed":
        raise InputError('softmax="summed" adds the scores of all heads before its softmax, so they cannot be split.')
    ranks = mesh.size()
    for what, count in (("query heads", module.n_heads), ("key-value heads", module.n_kv_heads)):
        if count % ranks:
            raise InputError(
                f"{count} {what} cannot be split evenly over {ranks} ranks. Use a number of ranks that divides both "
                f"{module.n_heads} query heads and {module.n_kv_heads} key-value heads."
            )
