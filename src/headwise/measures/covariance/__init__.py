"""Covariances of head outputs and gradients, layer by layer, in one streaming pass."""

from headwise.measures.covariance.accumulate import Scatter as Scatter
from headwise.measures.covariance.gradients import capturing as capturing
from headwise.measures.covariance.observing import CovarianceObserver as CovarianceObserver
from headwise.measures.covariance.observing import layer_of as layer_of
from headwise.measures.covariance.observing import taken_rows as taken_rows
from headwise.measures.covariance.statistics import ROWS_TAKEN as ROWS_TAKEN
from headwise.measures.covariance.statistics import SiteStatistics as SiteStatistics
from headwise.measures.covariance.statistics import Statistics as Statistics
