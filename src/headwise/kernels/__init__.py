"""Attention on tensors: one problem, several backends, one reference that judges them all."""

from headwise.kernels import reference as reference
from headwise.kernels.attention import attention as attention
from headwise.kernels.columns import received as received
from headwise.kernels.distance_bias import alibi as alibi
from headwise.kernels.distance_bias import alibi_slopes as alibi_slopes
from headwise.kernels.distance_bias import t5_bias as t5_bias
from headwise.kernels.masks import visible_at as visible_at
from headwise.kernels.masks import visible_block as visible_block
from headwise.kernels.masks import visible_counts as visible_counts
from headwise.kernels.problem import Answer as Answer
from headwise.kernels.problem import Choice as Choice
from headwise.kernels.problem import Predicate as Predicate
from headwise.kernels.problem import Problem as Problem
from headwise.kernels.problem import Rows as Rows
from headwise.kernels.problem import ScoreRule as ScoreRule
from headwise.kernels.problem import Visible as Visible
from headwise.kernels.problem import Wanted as Wanted
from headwise.kernels.registry import backends as backends
from headwise.kernels.registry import choose as choose
from headwise.kernels.registry import run as run
from headwise.kernels.visible_mean import mean_of_visible as mean_of_visible
