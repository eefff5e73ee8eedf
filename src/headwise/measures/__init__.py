"""Turns activations into a table of heads: one number per head, with its spread and its rows."""

from headwise.measures.conformance import Conformance as Conformance
from headwise.measures.conformance import check_measure as check_measure
from headwise.measures.measure import Look as Look
from headwise.measures.measure import Measure as Measure
from headwise.measures.measure import PooledMeasure as PooledMeasure
from headwise.measures.measure import RowMeasure as RowMeasure
from headwise.measures.measure import Sums as Sums
from headwise.measures.measure import WeightMeasure as WeightMeasure
from headwise.measures.observing import MeasureObserver as MeasureObserver
from headwise.measures.observing import PatternObserver as PatternObserver
from headwise.measures.pattern import PATTERN as PATTERN
from headwise.measures.pattern import PATTERN_MEASURES as PATTERN_MEASURES
from headwise.measures.reference import reference_page as reference_page
from headwise.measures.registry import GROUPS as GROUPS
from headwise.measures.registry import MEASURES as MEASURES
from headwise.measures.registry import Asked as Asked
from headwise.measures.registry import resolve as resolve
from headwise.measures.table import table_of as table_of
from headwise.measures.weights import HeadWeights as HeadWeights
