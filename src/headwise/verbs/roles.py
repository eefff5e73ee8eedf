"""What heads do: the verb behind ``hw.roles`` and ``headwise roles``."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch import nn

from headwise.data import TOKEN, Batches, batches
from headwise.errors import DataError, InputError, RunError
from headwise.measures.roles import (
    Criterion,
    Parse,
    Role,
    RoleObserver,
    RoleTable,
    coreference_role,
    given_count,
    read_conllu,
    read_pairs,
    repeated_tokens,
    resolve_roles,
    spacy_parser,
    syntax_roles,
)
from headwise.models import Model
from headwise.trace import run
from headwise.verbs.forecast import Bar
from headwise.verbs.prepared import Prepared, Source, prepare
from headwise.verbs.seeding import check_seed

__all__ = ["RolesResult", "roles", "roles_run"]

#: Tokens of the longest block of random tokens that induction is confirmed on.
_BLOCK: Final = 48


@dataclass(frozen=True)
class RolesResult:
    """What a search for roles gave.

    Attributes:
        table: the evidence for each role and head.
        run: the facts of the run, as in ``run.json`` (docs/format.md).
        path: the file that was written, or None.
    """

    table: RoleTable
    run: dict[str, Any]
    path: Path | None


def roles(model: str | Path | nn.Module | Model, texts: Any = None, **options: Any) -> RoleTable:
    """Which heads of ``model`` follow which rule on ``texts``; the table of :func:`roles_run`, where the options are.

    Example:
        >>> import torch
        >>> from headwise.verbs.roles import roles
        >>> from transformers import GPT2Config, GPT2Model
        >>> config = GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=31, bos_token_id=0, eos_token_id=0)
        >>> table = roles(GPT2Model(config), inputs=[{"input_ids": torch.tensor([[3, 1, 4, 1, 5]])}], roles="previous")
        >>> [one.rows for one in table["previous"]], table.assigned()
        ([4, 4], [])
    """
    return roles_run(model, texts, **options).table


def roles_run(
    model: str | Path | nn.Module | Model,
    texts: Any = None,
    *,
    inputs: Any = None,
    roles: Any = None,
    conllu: str | Path | None = None,
    unit: Literal["sentence", "document"] = "sentence",
    subtypes: bool = False,
    spacy: Any = None,
    pairs: str | Path | Sequence[str | Path] = (),
    confirm: bool = True,
    criterion: Criterion | None = None,
    replicates: int = 1000,
    output: str | Path | None = None,
    overwrite: bool = False,
    field: str | None = None,
    target_field: str | None = None,
    window: int | None = None,
    max_length: int | None = None,
    limit: int | None = None,
    batch_size: int = 8,
    seed: int = 0,
    backend: str | None = None,
    progress: Bar | None = None,
    notice: Callable[[str], None] | None = None,
    **loading: Any,
) -> RolesResult:
    """For each role and head: how much weight goes where the role says, beside what position and chance give.

    Nothing of the size of queries times keys is built: weights are taken at the pairs that roles name, and where words
    or chosen candidates compete, from a few rows of the pattern at a time.

    Args:
        model, texts, inputs, field, target_field, window, max_length, limit, batch_size, backend, progress, notice,
            loading: as for :func:`headwise.scan`.
        roles: names (:data:`headwise.measures.roles.NAMED`), :class:`~headwise.measures.roles.Role` objects and plain
            functions from tokens to (query, key) pairs; one or several. All named ones by default.
        conllu: a CoNLL-U file: adds the syntactic head, dependents and relations, and coreference where the file has
            it. Its text is read where no ``texts`` are given; otherwise they must be the same passages.
        unit: what a passage of the CoNLL-U file is.
        subtypes: keep subtypes of relations (``nmod:poss``) apart.
        spacy: a spaCy model that parses ``texts``, instead of ``conllu``.
        pairs: .jsonl files of given pairs; see :func:`~headwise.measures.roles.read_pairs`.
        confirm: where induction is looked for, also measure it on repeated random tokens (role
            ``"induction_repeated"``).
        criterion: when a head is assigned a role.
        replicates: of the bootstrap over passages.
        output: a .json file to write the table to.
        overwrite: replace ``output``.
        seed: of the shuffled pairs, the bootstrap and the random tokens.

    Returns:
        The table, the facts of the run, and the file.

    Raises:
        InputError: an argument breaks its rule; a rule names positions out of range or hidden keys; the data cannot be
            read, do not match the parse, or have no passage of two tokens (``DataError``).
        ModelError: the model cannot be loaded or is not understood.
        RunError: ``output`` is there already, or cannot be written.
    """
    started = time.monotonic()
    check_seed(seed)
    _check_output(output, overwrite)
    if isinstance(replicates, bool) or not isinstance(replicates, int) or replicates < 1:
        raise InputError(f"replicates must be a whole number of at least 1, and is {replicates!r}")
    parses, further = _further(conllu, unit, subtypes, spacy, pairs, limit)
    wanted = resolve_roles(roles, further)
    if parses is not None and texts is None and inputs is None:
        texts = [parse.text for parse in parses]
    source = Source(texts, inputs, field, target_field, window, max_length, limit, batch_size)
    ready = prepare(model, source, loading, progress=progress, notice=notice)
    counts, notes = _counted(ready.data)
    if limit is None:
        _check_count(parses, wanted, ready)
    observer = RoleObserver(wanted, ready.model.tokenizer, counts=counts, seed=seed, replicates=replicates)
    run(ready.model, ready.data, [observer, ready.log], backend=backend, progress=ready.shown)
    observers = [observer]
    if confirm and any(role.name == "induction" for role in wanted):
        confirmed = _confirmation(ready.model, counts, seed, replicates)
        observers += [] if isinstance(confirmed, str) else [confirmed]
        notes += [confirmed] if isinstance(confirmed, str) else []
    table = RoleTable.build(ready.model.layout, observers, criterion or Criterion(), **ready.facts)
    asked = {
        "roles": [role.name for role in wanted],
        "conllu": None if conllu is None else str(conllu),
        "spacy": spacy if spacy is None or isinstance(spacy, str) else type(spacy).__name__,
        "criterion": vars(table.criterion),
        "replicates": replicates,
        "backend": backend,
    }
    document = ready.document(seed=seed, seconds=time.monotonic() - started, notes=notes, **asked)
    return RolesResult(table, document, None if output is None else table.save(output))


def _check_output(output: str | Path | None, overwrite: bool) -> None:
    if output is None:
        return
    path = Path(output)
    if path.is_dir():
        raise RunError(f"{path} is a folder; give the path of a file, for example {path / 'roles.json'}")
    if path.exists() and not overwrite:
        raise RunError(f"{path} is there already; give another path, or overwrite=True (--overwrite)")
    if not path.absolute().parent.is_dir():
        raise RunError(f"{path} cannot be written: there is no folder {path.absolute().parent}")


def _further(
    conllu: str | Path | None,
    unit: Literal["sentence", "document"],
    subtypes: bool,
    spacy: Any,
    pairs: str | Path | Sequence[str | Path],
    limit: int | None,
) -> tuple[list[Parse] | None, list[Role]]:
    """The parses of a CoNLL-U file, and the roles that come from files and parsers."""
    if conllu is not None and spacy is not None:
        raise InputError("give conllu or spacy, one parse of the text; both were given")
    found: list[Role] = []
    parses = None
    if conllu is not None:
        parses = read_conllu(conllu, unit=unit, limit=limit)
        found += syntax_roles(parses, subtypes=subtypes)
        if any(parse.mentions for parse in parses):
            found.append(coreference_role(parses))
    elif spacy is not None:
        found += syntax_roles(spacy_parser(spacy), subtypes=subtypes)
    listed = [pairs] if isinstance(pairs, str | Path) else list(pairs)
    return parses, [*found, *(read_pairs(path) for path in listed)]


def _counted(data: Batches) -> tuple[Counter[int], list[str]]:
    """How often each id occurs, and a note on passages that are too short.

    Raises:
        DataError: no passage has two tokens.
    """
    counts: Counter[int] = Counter()
    short: list[str] = []
    passages = 0
    for batch in data:
        for row in range(len(batch.passages)):
            passages += 1
            if batch.input_rows is None or "input_ids" not in batch.inputs:
                continue
            ids = batch.inputs["input_ids"][row][batch.input_rows[row] == TOKEN].tolist()
            counts.update(ids)
            if len(ids) < 2:
                short.append(batch.where[row] if row < len(batch.where) else f"passage {batch.passages[row]}")
    if len(short) == passages:
        raise DataError(
            f"{short[0]}: has fewer than two tokens, and so has every passage; a head has nothing to choose between "
            "there: give longer text"
        )
    if not short:
        return counts, []
    more = f" and {len(short) - 1} more" if len(short) > 1 else ""
    return counts, [f"{short[0]}{more}: fewer than two tokens, so nearly no row to measure"]


def _check_count(parses: Sequence[Parse] | None, wanted: Sequence[Role], ready: Prepared) -> None:
    """Refuse parses, or given pairs, of another number of passages: they are of another text.

    Raises:
        DataError: both numbers.
    """
    facts = ready.survey.facts
    found = facts.passages + facts.skipped_passages
    if parses is not None and found != len(parses):
        raise DataError(
            f"the text has {found} passages and the CoNLL-U file {len(parses)}: passage {min(found, len(parses))} "
            "(counted from 0) is in one of them only; give the text that was parsed"
        )
    for role in wanted:
        listed = given_count(role)
        if listed is not None and listed > found:
            raise DataError(
                f"role {role.name!r}: pairs of {listed} passages were given, and the text has {found}; give pairs for "
                "each passage, in the same order"
            )


def _confirmation(model: Model, counts: Mapping[int, int], seed: int, replicates: int) -> RoleObserver | str:
    """Induction on repeated random tokens; or why it could not be measured."""
    rules = model.input_rules
    said = "induction was not confirmed on repeated random tokens: "
    if rules.main_input != "input_ids" or rules.encoder_decoder:
        return said + "the model does not read one sequence of tokens"
    tokenizer = model.tokenizer
    special = set(getattr(tokenizer, "all_special_ids", None) or ())
    ids = sorted(set(counts) - special)
    if len(ids) < _BLOCK:
        ids = [one for one in range(rules.vocabulary or 0) if one not in special]
    longest = min(_BLOCK, len(ids), ((rules.positions or 4 * _BLOCK) - 2) // 2)
    if longest < 8:
        return said + f"there are {len(ids)} ids to draw from and {rules.positions} positions"
    inputs, role = repeated_tokens(ids, before=_beginning(tokenizer), longest=longest, seed=seed)
    observer = RoleObserver([role], tokenizer, seed=seed, replicates=replicates)
    with torch.random.fork_rng(devices=[]):
        run(model, batches(model, inputs, batch_size=8), [observer])
    return observer


def _beginning(tokenizer: Any) -> list[int]:
    """The special tokens that the tokenizer puts before a text."""
    if not (callable(tokenizer) and hasattr(tokenizer, "model_input_names")):
        return []
    framed = tokenizer("a", add_special_tokens=True, return_special_tokens_mask=True)
    marks = framed["special_tokens_mask"]
    count = next((at for at, mark in enumerate(marks) if not mark), 0)
    return [int(one) for one in framed["input_ids"][:count]]
