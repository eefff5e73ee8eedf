"""Text and ready inputs, read piece by piece and made into padded batches.

This package reads files and knows no model: what a model demands of its input arrives as
:class:`InputRules`, and a tokenizer is known by how it is called.
"""

from headwise.data.batch import PADDING as PADDING
from headwise.data.batch import SPECIAL as SPECIAL
from headwise.data.batch import TOKEN as TOKEN
from headwise.data.batch import Batch as Batch
from headwise.data.batching import Batches as Batches
from headwise.data.batching import batches as batches
from headwise.data.facts import Facts as Facts
from headwise.data.passages import Passage as Passage
from headwise.data.passages import Passages as Passages
from headwise.data.passages import as_passages as as_passages
from headwise.data.passages import read_passages as read_passages
from headwise.data.ready import ReadyInputs as ReadyInputs
from headwise.data.ready import read_inputs as read_inputs
from headwise.data.rules import InputRules as InputRules
from headwise.data.rules import TakesInput as TakesInput

__all__ = [
    "PADDING",
    "SPECIAL",
    "TOKEN",
    "Batch",
    "Batches",
    "Facts",
    "InputRules",
    "Passage",
    "Passages",
    "ReadyInputs",
    "TakesInput",
    "as_passages",
    "batches",
    "read_inputs",
    "read_passages",
]
