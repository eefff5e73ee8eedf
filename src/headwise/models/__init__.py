"""Finds and holds the heads of a model: loading, the seam into its attention, layouts, gates."""

from headwise.models.gate import Gates as Gates
from headwise.models.gate import gate as gate
from headwise.models.handle import Model as Model
from headwise.models.handle import wrap as wrap
from headwise.models.interface import AttentionCall as AttentionCall
from headwise.models.interface import Observer as Observer
from headwise.models.layouts import discover as discover
from headwise.models.layouts import forget as forget
from headwise.models.layouts import output_weight as output_weight
from headwise.models.loader import as_model as as_model
from headwise.models.loader import load as load
from headwise.models.saving import check_target as check_target
from headwise.models.sessions import Session as Session
from headwise.models.sessions import layout_of as layout_of
from headwise.models.sessions import observe as observe
from headwise.models.source import Source as Source
from headwise.models.source import weight_hash as weight_hash
from headwise.models.stock import expressible as expressible
