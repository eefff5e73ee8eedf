"""How alike heads are: patterns by Jensen-Shannon distance, outputs by CKA, clusters and a map."""

from headwise.measures.similarity.alignment import OutputAlignment as OutputAlignment
from headwise.measures.similarity.clusters import average_linkage as average_linkage
from headwise.measures.similarity.clusters import classical_map as classical_map
from headwise.measures.similarity.clusters import cut as cut
from headwise.measures.similarity.divergence import PatternDistances as PatternDistances
from headwise.measures.similarity.divergence import js_divergence as js_divergence
from headwise.measures.similarity.result import HeadMap as HeadMap
from headwise.measures.similarity.result import Pair as Pair
from headwise.measures.similarity.result import Redundancy as Redundancy
from headwise.measures.similarity.rows import chosen_rows as chosen_rows
from headwise.measures.similarity.rows import patterns_at as patterns_at
