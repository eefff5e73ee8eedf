"""What surgery did to a model, and the proof that it did no more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["BlockChange", "LayerProof", "Proof", "SurgeryRecord"]


@dataclass(frozen=True)
class BlockChange:
    """What was cut of one block.

    Attributes:
        module: path of the attention module.
        sites: names of the attention computations that read it.
        removed: its query heads that went, by their numbers before this surgery.
        query_heads, kv_heads: numbers before and after.
        kv_map: for each query head that is left, the key-value head that it reads.
        even: whether the module's own code pairs them; otherwise an explicit map stands before its attention.
        parameters: how many parameters went (repair may add biases).
        means: heads that are left in order to put out a running mean, each with the heads that it stands for, itself
            the first, by their numbers before this surgery.
    """

    module: str
    sites: tuple[str, ...]
    removed: tuple[int, ...]
    query_heads: tuple[int, int]
    kv_heads: tuple[int, int]
    kv_map: tuple[int, ...]
    even: bool
    parameters: int
    means: tuple[tuple[int, ...], ...] = ()

    @property
    def averaged(self) -> tuple[int, ...]:
        """Every head in whose place a running mean stands, sorted."""
        return tuple(sorted(head for one in self.means for head in one))


@dataclass(frozen=True)
class LayerProof:
    """One call of a cut layer on the same input: the original with the heads gated, and the layer without them.

    Attributes:
        block: path of the attention module.
        module: path of the output projection whose output was compared.
        call: which call of it, from 0.
        difference: largest absolute difference.
        largest: largest absolute output.
    """

    block: str
    module: str
    call: int
    difference: float
    largest: float


@dataclass(frozen=True)
class Proof:
    """Removed equals gated.

    Attributes:
        layers: every call of every cut layer.
        bound: what was allowed, as a part of the largest output.
        end_to_end: largest absolute difference of the model's outputs.
        largest: largest absolute output of the model.
        noise: the same difference between the original's eager attention and the one that it is set to; None where it
            has only one.
        identical: whether the outputs are the same bit for bit.
    """

    layers: tuple[LayerProof, ...]
    bound: float
    end_to_end: float
    largest: float
    noise: float | None
    identical: bool


@dataclass(frozen=True)
class SurgeryRecord:
    """One surgery.

    Attributes:
        model: name of the model before.
        weight_hash: of the model before.
        blocks: what was cut.
        proof: that nothing else was changed, taken before the repair.
        repair: ``method``, and for each output projection what it was worth.
        parameters: of the whole model, before and after.
        bytes: of all parameters and buffers, what is shared counted once, before and after.
        earlier: the surgeries that the model had had before this one.
        plan: what the plan says of itself.
    """

    model: str
    weight_hash: str
    blocks: tuple[BlockChange, ...]
    proof: Proof
    repair: Mapping[str, Any]
    parameters: tuple[int, int]
    bytes: tuple[int, int]
    earlier: tuple[Mapping[str, Any], ...] = ()
    plan: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        heads = sum(len(one.removed) for one in self.blocks)
        before, after = self.parameters
        return (
            f"SurgeryRecord({self.model}: {heads} heads of {len(self.blocks)} blocks removed, repair "
            f"{self.repair.get('method')}, {before:,} -> {after:,} parameters, {len(self.proof.layers)} layer calls "
            "proved)"
        )

    def to_document(self) -> dict[str, Any]:
        """As JSON holds it."""
        document: dict[str, Any] = _plain(asdict(self))
        for block in document["blocks"]:
            if not block["means"]:  # only there where running means are
                del block["means"]
        return document

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> SurgeryRecord:
        """Read what :meth:`to_document` wrote."""
        blocks = tuple(BlockChange(**_tuples(one)) for one in document["blocks"])
        proof = dict(document["proof"])
        proof["layers"] = tuple(LayerProof(**one) for one in proof["layers"])
        return cls(
            model=document["model"],
            weight_hash=document["weight_hash"],
            blocks=blocks,
            proof=Proof(**proof),
            repair=document["repair"],
            parameters=(document["parameters"][0], document["parameters"][1]),
            bytes=(document["bytes"][0], document["bytes"][1]),
            earlier=tuple(document["earlier"]),
            plan=document["plan"],
        )


def _tuples(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {str(name): _tupled(value) for name, value in entry.items()}


def _tupled(value: Any) -> Any:
    return tuple(map(_tupled, value)) if isinstance(value, list) else value


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return value
