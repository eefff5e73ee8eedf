"""Turns activations into a table of heads: one number per head, with its spread and its rows."""

from headwise.measures.definitions import PATTERN_MEASURES as PATTERN_MEASURES
from headwise.measures.pattern import PatternObserver as PatternObserver
from headwise.measures.table import table_of as table_of
