"""Measure the heads while the user runs the model: generation, training steps, anything."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from headwise.errors import MeasureError
from headwise.heads import HeadTable
from headwise.kernels import Problem, Wanted
from headwise.layout import HeadLayout, Site
from headwise.measures import PatternObserver, table_of
from headwise.models import AttentionCall, Model, layout_of, observe

__all__ = ["Watch", "watch"]


class Watch:
    """What :func:`watch` hands out: the table of what was seen so far."""

    def __init__(self, layout: HeadLayout, name: str | None) -> None:
        self._layout, self._name = layout, name
        self._observer = PatternObserver()

    def want(self, site: Site, problem: Problem) -> Wanted | None:
        """The statistics that the measures need."""
        return self._observer.want(site, problem, None)

    def see(self, call: AttentionCall) -> None:
        """Fold in one call."""
        self._observer.see(call, None)

    @property
    def table(self) -> HeadTable:
        """The table over every site that was called.

        Raises:
            MeasureError: no attention was computed inside the block.
        """
        called = {site.key for site in self._observer.sites}
        if not called:
            raise MeasureError("no attention was computed inside the block; run the model there")
        sites = tuple(site for site in self._layout.sites if site.key in called)
        blocks = {site.block: self._layout.blocks[site.block] for site in sites}
        return table_of(HeadLayout(sites, blocks), self._observer, model=self._name)


@contextmanager
def watch(model: Model | nn.Module, *, backend: str | None = None) -> Iterator[Watch]:
    """Inside the block every forward pass of ``model`` is measured, whoever runs it: ``generate()``, a training loop.

    Each query row counts once: a prompt of 3 tokens and 3 generated ones give 5 rows. Rows of padding are left out
    where the padding mask shows them. No tokenizer says which rows are special tokens, so all count as tokens.

    Args:
        model: a loaded or wrapped model, or the module itself.
        backend: force one attention backend.

    Raises:
        UnsupportedError: the model is of a kind that is not understood.

    Example:
        >>> import headwise as hw, torch
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=31)).eval()
        >>> with hw.watch(model) as watched:
        ...     _ = model.generate(torch.tensor([[3, 1, 4]]), max_new_tokens=3, min_new_tokens=3, pad_token_id=0)
        >>> watched.table.count("entropy").tolist()
        [5, 5, 5, 5]
    """
    name = model.name if isinstance(model, Model) else type(model).__name__
    watched = Watch(layout_of(model), name)
    with observe(model, watched, backend=backend):
        yield watched
