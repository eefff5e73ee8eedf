"""What heads do: rules that name the key each query should look at, and the evidence that a head follows one."""

from headwise.measures.roles.alignment import monotonic as monotonic
from headwise.measures.roles.conll import read_conllu as read_conllu
from headwise.measures.roles.given import given_count as given_count
from headwise.measures.roles.given import given_pairs as given_pairs
from headwise.measures.roles.given import read_pairs as read_pairs
from headwise.measures.roles.lexical import duplicate as duplicate
from headwise.measures.roles.lexical import induction as induction
from headwise.measures.roles.links import Groups as Groups
from headwise.measures.roles.links import Pairs as Pairs
from headwise.measures.roles.observer import RoleObserver as RoleObserver
from headwise.measures.roles.parse import Mention as Mention
from headwise.measures.roles.parse import Parse as Parse
from headwise.measures.roles.positional import at_offset as at_offset
from headwise.measures.roles.registry import NAMED as NAMED
from headwise.measures.roles.registry import resolve_roles as resolve_roles
from headwise.measures.roles.repeated import repeated_tokens as repeated_tokens
from headwise.measures.roles.role import Role as Role
from headwise.measures.roles.role import as_role as as_role
from headwise.measures.roles.score import RoleScore as RoleScore
from headwise.measures.roles.spacy_parse import spacy_parser as spacy_parser
from headwise.measures.roles.syntax import coreference_role as coreference_role
from headwise.measures.roles.syntax import syntax_roles as syntax_roles
from headwise.measures.roles.table import RoleTable as RoleTable
from headwise.measures.roles.tokens import Tokens as Tokens
from headwise.measures.roles.verdict import Criterion as Criterion
