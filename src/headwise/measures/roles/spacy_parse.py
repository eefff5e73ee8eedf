"""Parses from an installed spaCy model."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from headwise.errors import InputError
from headwise.measures.roles.parse import Parse
from headwise.measures.roles.tokens import Tokens

__all__ = ["spacy_parser"]


def spacy_parser(model: str | Any) -> Callable[[Tokens], Parse]:
    """A function that parses the text of a passage with spaCy.

    Needs spaCy and a model of it (``pip install 'headwise[spacy]'`` and, for instance, ``en-core-web-sm``).

    Args:
        model: the name of an installed spaCy model or of a package with a ``load`` function, or a loaded pipeline.

    Raises:
        InputError: spaCy or the model is not installed, or the pipeline has no parser.
    """
    pipeline = _load(model) if isinstance(model, str) else model
    if "parser" not in getattr(pipeline, "pipe_names", ()):
        raise InputError(f"the spaCy pipeline {model!r} has no parser; give one that has, such as 'en_core_web_sm'")
    latest: dict[str, Parse] = {}

    def parse(tokens: Tokens) -> Parse:
        if tokens.text is None:
            tokens.spans  # noqa: B018  (refuses with the reason)
        assert tokens.text is not None
        if tokens.text not in latest:
            if len(latest) > 256:
                latest.clear()
            latest[tokens.text] = _parse_of(pipeline(tokens.text), f"the parse of {tokens.where}")
        return latest[tokens.text]

    return parse


def _load(name: str) -> Any:
    try:
        spacy = import_module("spacy")
    except ModuleNotFoundError:
        raise InputError(
            "roles of grammar by spaCy need spaCy; install it with: pip install 'headwise[spacy]'"
        ) from None
    try:
        return spacy.load(name)
    except OSError:
        pass
    try:
        return import_module(name.replace("-", "_")).load()
    except (ModuleNotFoundError, AttributeError):
        raise InputError(
            f"there is no spaCy model {name!r} here; install one (for English: en-core-web-sm) and name it"
        ) from None


def _parse_of(document: Any, where: str) -> Parse:
    kept = [token for token in document if not token.is_space]
    place = {token.i: at for at, token in enumerate(kept)}
    heads = [-1 if token.head.i == token.i else place.get(token.head.i, -1) for token in kept]
    return Parse(
        document.text,
        [(token.idx, token.idx + len(token.text)) for token in kept],
        heads,
        [token.dep_ for token in kept],
        (),
        where,
    )
