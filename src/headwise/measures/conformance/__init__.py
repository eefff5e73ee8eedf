"""Whether a measure depends on what it must not: padding, batches, order of heads, device, chance."""

from headwise.measures.conformance.checks import CHECKS as CHECKS
from headwise.measures.conformance.suite import Conformance as Conformance
from headwise.measures.conformance.suite import check_measure as check_measure
