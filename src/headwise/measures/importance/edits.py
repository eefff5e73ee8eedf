"""Replaces the output of one head while the model runs: by zero, by its mean, or by rows of other passages."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Final, Literal

import torch
from torch import Tensor

from headwise.data import Batch
from headwise.errors import InputError, MeasureError
from headwise.kernels import Problem, Wanted
from headwise.layout import Site, SiteKey
from headwise.measures.importance.passages import generator_for, passage_keys
from headwise.models import AttentionCall, Gates
from headwise.trace import PADDING, row_kinds

__all__ = ["ABLATIONS", "Ablation", "HeadEdit", "OutputBank"]

Ablation = Literal["zero", "mean", "resample"]
ABLATIONS: Final[tuple[Ablation, ...]] = ("zero", "mean", "resample")

#: Passages and rows of each that resampling draws from.
_BANK_PASSAGES: Final = 64
_BANK_ROWS: Final = 8


class HeadEdit(Gates):
    """Puts other numbers in the place of one head's output, where a gate would act."""

    def __init__(self) -> None:
        self.rules = {}
        self.used = set()
        self.site: SiteKey | None = None
        self.head = 0
        self.value: Tensor | None = None

    def aim(self, site: SiteKey | None, head: int = 0, value: Tensor | None = None) -> None:
        """From now on the head's output is ``value``, broadcastable to (B, Q, D_v); None for zero; no site: no edit."""
        self.site, self.head, self.value = site, head, value
        self.used.clear()

    def apply(
        self,
        key: SiteKey,
        count: int,
        output_BQHD: Tensor,
        means: Callable[[], Tensor] | None = None,  # noqa: ARG002
    ) -> Tensor:
        """``output_BQHD`` with the head replaced."""
        if key != self.site:
            return output_BQHD
        if not 0 <= self.head < count:
            raise MeasureError(f"{key}: there is no head {self.head}; it has the heads 0 to {count - 1}")
        self.used.add(key)
        edited = output_BQHD.clone()
        edited[:, :, self.head] = 0.0 if self.value is None else self.value.to(edited)
        return edited


class OutputBank:
    """Looks on at a pass over the data and keeps what mean and resample ablation put in a head's place.

    The rows to draw from are those of the 64 passages whose content hashes lowest, eight rows of each, so that batches,
    order and splitting of the data do not change them.

    Args:
        seed: of the choice of rows.
    """

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        self._totals: dict[SiteKey, tuple[Tensor, int]] = {}
        self._rows: dict[SiteKey, list[tuple[int, Tensor]]] = {}
        self._keys: tuple[Batch, tuple[int, ...]] | None = None

    def want(self, site: Site, problem: Problem, batch: Batch | None) -> Wanted:  # noqa: ARG002
        """Nothing beside z."""
        return Wanted()

    def see(self, call: AttentionCall, batch: Batch | None) -> None:
        """Take one call."""
        assert batch is not None
        real_BQ = row_kinds(call.site, call.problem, batch) != PADDING
        z_BQHD = call.z.detach().transpose(1, 2)
        total, rows = self._totals.get(call.site.key, (torch.zeros((), dtype=torch.float64), 0))
        real = z_BQHD[real_BQ].double()
        self._totals[call.site.key] = (total.to(real.device) + real.sum(0), rows + len(real))
        if real_BQ.shape[0] == len(batch.passages):
            self._bank(call.site.key, z_BQHD, real_BQ, self._of(batch))

    def _of(self, batch: Batch) -> tuple[int, ...]:
        if self._keys is None or self._keys[0] is not batch:
            self._keys = (batch, passage_keys(batch))
        return self._keys[1]

    def _bank(self, site: SiteKey, z_BQHD: Tensor, real_BQ: Tensor, keys: tuple[int, ...]) -> None:
        kept = self._rows.setdefault(site, [])
        for row, key in enumerate(keys):
            if any(key == -other for other, _ in kept) or (len(kept) == _BANK_PASSAGES and key >= -kept[0][0]):
                continue
            at = real_BQ[row].nonzero().flatten()
            order = torch.randperm(len(at), generator=generator_for(key, self._seed, "bank"), device="cpu")[:_BANK_ROWS]
            heapq.heappush(kept, _Entry((-key, z_BQHD[row, at[order.to(at.device)]].clone())))
            if len(kept) > _BANK_PASSAGES:
                heapq.heappop(kept)

    def mean(self, site: SiteKey) -> Tensor:
        """The mean output of every head over real rows, (H, D_v), float64."""
        total, rows = self._totals[site]
        return total / rows

    def draws(self, site: SiteKey, batch: Batch, kinds_BQ: Tensor) -> Tensor:
        """For every real row of a batch the outputs of all heads at a row of another passage, (B, Q, H, D_v).

        Padding rows get zeros.

        Raises:
            InputError: there is no other passage.
        """
        entries = sorted(self._rows.get(site, []), reverse=True)
        drawn = []
        for row, key in enumerate(self._of(batch)):
            others = [rows for other, rows in entries if other != -key]
            if not others:
                raise InputError(
                    "resample ablation puts rows of other passages in a head's place, and there is only one passage; "
                    "give more, or ablate by 'mean' or 'zero'"
                )
            pool = torch.cat(others)
            real = (kinds_BQ[row] != PADDING).to(pool.device)
            draw = generator_for(key, self._seed, "resample")
            pick = torch.randint(len(pool), (int(real.sum()),), generator=draw, device="cpu")
            rows = pool.new_zeros(len(real), *pool.shape[1:])
            rows[real] = pool[pick.to(pool.device)]
            drawn.append(rows)
        return torch.stack(drawn)


class _Entry(tuple[int, Tensor]):
    """Ordered by its number alone."""

    __slots__ = ()

    def __lt__(self, other: tuple[int, Tensor]) -> bool:  # type: ignore[override]
        return self[0] < other[0]
