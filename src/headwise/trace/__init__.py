"""Runs a model over data and hands activations to observers, a layer at a time."""

from headwise.trace.rows import PADDING as PADDING
from headwise.trace.rows import SPECIAL as SPECIAL
from headwise.trace.rows import TOKEN as TOKEN
from headwise.trace.rows import row_kinds as row_kinds
from headwise.trace.rows import row_offset as row_offset
from headwise.trace.run import BatchObserver as BatchObserver
from headwise.trace.run import Progress as Progress
from headwise.trace.run import body_of as body_of
from headwise.trace.run import evaluating as evaluating
from headwise.trace.run import run as run
