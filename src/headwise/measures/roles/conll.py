"""Parses from a CoNLL-U file."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Literal

from headwise.errors import DataError, InputError
from headwise.measures.roles.parse import Mention, Parse
from headwise.measures.roles.tokens import Span

__all__ = ["read_conllu"]

_ENTITY: Final = re.compile(r"\(([^()]*)(\))?|([^()\s]+)\)")


def read_conllu(
    path: str | Path, *, unit: Literal["sentence", "document"] = "sentence", limit: int | None = None
) -> list[Parse]:
    """The parses of a CoNLL-U file, one for each sentence or each document.

    Needs the package ``conllu`` (``pip install 'headwise[conllu]'``). Multi-word tokens (``1-2``) are split by the
    forms of their words where these spell them out; otherwise their characters go to the first word. Empty nodes are
    left out. Mentions are read from ``Entity=`` in the MISC column (Universal Anaphora, CorefUD).

    Args:
        path: the file.
        unit: what one passage is. Documents begin at ``# newdoc``; their sentences are joined by a space.
        limit: only the first so many.

    Raises:
        DataError: the file is missing, is no CoNLL-U, or its words do not spell its ``# text``.
        InputError: ``conllu`` is not installed.
    """
    if unit not in ("sentence", "document"):
        raise InputError(f"unit must be 'sentence' or 'document', and is {unit!r}")
    file = Path(path).expanduser()
    if not file.is_file():
        raise DataError(f"{path}: there is no such file; give a CoNLL-U file")
    found: list[Parse] = []
    for sentences in _units(file, unit):
        found.append(_joined(sentences))
        if limit is not None and len(found) >= limit:
            break
    if not found:
        raise DataError(f"{path}: holds no sentence; give a CoNLL-U file")
    return found


def _units(file: Path, unit: str) -> Iterator[list[Parse]]:
    gathered: list[Parse] = []
    for number, (sentence, starts) in enumerate(_sentences(file)):
        one = _parse(sentence, f"{file.name} sentence {number} (counted from 0)")
        if gathered and (unit == "sentence" or starts):
            yield gathered
            gathered = []
        gathered.append(one)
    if gathered:
        yield gathered


def _sentences(file: Path) -> Iterator[tuple[Any, bool]]:
    try:
        import conllu
        from conllu.exceptions import ParseException
    except ModuleNotFoundError:
        raise InputError(
            "reading CoNLL-U needs the package conllu; install it with: pip install 'headwise[conllu]'"
        ) from None
    with open(file, encoding="utf-8-sig") as lines:
        try:
            for sentence in conllu.parse_incr(lines):
                yield sentence, any(name.startswith("newdoc") for name in sentence.metadata)
        except ParseException as error:
            raise DataError(f"{file}: is not CoNLL-U ({' '.join(str(error).split())})") from None
        except UnicodeDecodeError:
            raise DataError(f"{file}: is not UTF-8 text, and CoNLL-U is") from None


def _parse(sentence: Any, where: str) -> Parse:
    words = [token for token in sentence if isinstance(token["id"], int)]
    if not words:
        raise DataError(f"{where}: has no words")
    place = {token["id"]: at for at, token in enumerate(words)}
    text, spans = _spelled(sentence, where)
    heads = []
    for token in words:
        head = token.get("head")
        if not isinstance(head, int) or (head and head not in place):
            raise DataError(
                f"{where}: word {token['id']} ({token['form']}) has the head {head!r}, which is no word of the sentence"
            )
        heads.append(place[head] if head else -1)
    relations = [str(token.get("deprel") or "_") for token in words]
    return Parse(text, spans, heads, relations, _mentions(words, heads, where), where)


def _spelled(sentence: Any, where: str) -> tuple[str, list[Span | None]]:
    """The text and the characters of each word, checked against ``# text``."""
    pieces: list[str] = []
    spans: list[Span | None] = []
    length, until = 0, 0
    for token in sentence:
        index, form = token["id"], str(token["form"])
        misc = token.get("misc") or {}
        space = "" if misc.get("SpaceAfter") == "No" else " "
        if isinstance(index, int):
            if index > until:
                spans.append((length, length + len(form)))
                pieces.append(form + space)
                length += len(form) + len(space)
        elif index[1] == "-":
            first, _, last = index
            inner = [str(one["form"]) for one in sentence if isinstance(one["id"], int) and first <= one["id"] <= last]
            spans += _split(form, inner, length)
            until = int(last)
            pieces.append(form + space)
            length += len(form) + len(space)
    text = "".join(pieces).rstrip()
    stated = sentence.metadata.get("text")
    if stated is None:
        return text, spans
    return _settled(text, spans, str(stated), where)


def _split(form: str, inner: Sequence[str], start: int) -> list[Span | None]:
    if "".join(inner) != form:
        return [(start, start + len(form)), *([None] * (len(inner) - 1))]
    out: list[Span | None] = []
    for word in inner:
        out.append((start, start + len(word)))
        start += len(word)
    return out


def _settled(text: str, spans: list[Span | None], stated: str, where: str) -> tuple[str, list[Span | None]]:
    """The words' places in ``# text``, whose white space may differ from SpaceAfter."""
    if text == stated:
        return text, spans
    place: dict[int, int] = {}
    at = 0
    for index, character in enumerate(text):
        if character.isspace():
            continue
        while at < len(stated) and stated[at].isspace():
            at += 1
        if at >= len(stated) or stated[at] != character:
            found = stated[at : at + 20]
            raise DataError(
                f"{where}: its words do not spell its # text: the words go on with {text[index : index + 20]!r} where "
                f"the text has {found!r}"
            )
        place[index] = at
        at += 1
    if stated[at:].strip():
        raise DataError(f"{where}: its words do not spell its # text: the text goes on with {stated[at : at + 20]!r}")
    moved: list[Span | None] = []
    for span in spans:
        inside = [place[index] for index in range(*span) if index in place] if span is not None else []
        moved.append((inside[0], inside[-1] + 1) if inside else None)
    return stated, moved


def _mentions(words: Sequence[Any], heads: Sequence[int], where: str) -> list[Mention]:
    """Mentions from ``Entity=(e1-person-...`` and ``e1)``; only the entity's name is read."""
    open_at: dict[str, list[int]] = {}
    found: list[Mention] = []
    for at, token in enumerate(words):
        value = (token.get("misc") or {}).get("Entity")
        for opened, closed, closing in _ENTITY.findall(str(value)) if value else ():
            if opened:
                name = opened.split("-")[0]
                if closed:
                    found.append(Mention(name, at, at + 1, at))
                else:
                    open_at.setdefault(name, []).append(at)
                continue
            name = closing.split("-")[0]
            if not open_at.get(name):
                raise DataError(f"{where}: word {token['id']} ends a mention of {name!r} that nothing began")
            start = open_at[name].pop()
            found.append(Mention(name, start, at + 1, _head_of(start, at + 1, heads)))
    return found


def _head_of(start: int, stop: int, heads: Sequence[int]) -> int:
    """The word of ``[start, stop)`` whose head lies outside: the last such one."""
    outside = [word for word in range(start, stop) if not start <= heads[word] < stop]
    return outside[0] if outside else stop - 1


def _joined(sentences: Sequence[Parse]) -> Parse:
    if len(sentences) == 1:
        return sentences[0]
    text = ""
    words: list[Span | None] = []
    heads: list[int] = []
    relations: list[str] = []
    mentions: list[Mention] = []
    for one in sentences:
        before = len(words)
        start = len(text) + (1 if text else 0)
        text = f"{text} {one.text}" if text else one.text
        words += [None if span is None else (span[0] + start, span[1] + start) for span in one.words]
        heads += [head if head < 0 else head + before for head in one.heads]
        relations += one.relations
        mentions += [
            Mention(mention.entity, mention.start + before, mention.stop + before, mention.head + before)
            for mention in one.mentions
        ]
    return Parse(text, words, heads, relations, mentions, sentences[0].where)
