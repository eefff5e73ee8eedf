"""How families of models name things: projections, stacks, counts. Structure decides, never a model's name."""

from headwise.models.families.counts import check_counts as check_counts
from headwise.models.families.counts import check_groups as check_groups
from headwise.models.families.fields import field_of as field_of
from headwise.models.families.fields import layers_of as layers_of
from headwise.models.families.fields import values_of as values_of
from headwise.models.families.projections import Projections as Projections
from headwise.models.families.projections import find_projections as find_projections
from headwise.models.families.stacks import is_cross as is_cross
from headwise.models.families.stacks import stack_of as stack_of
from headwise.models.families.stacks import takes_cache as takes_cache
