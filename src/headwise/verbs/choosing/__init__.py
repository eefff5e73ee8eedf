"""What planning needs of a model: its heads in numbers, its loss without some of them, gradients, layer times."""

from headwise.verbs.choosing.asked import Asked as Asked
from headwise.verbs.choosing.asked import unit_for as unit_for
from headwise.verbs.choosing.building import CRITERIA as CRITERIA
from headwise.verbs.choosing.building import Tools as Tools
from headwise.verbs.choosing.building import criterion_of as criterion_of
from headwise.verbs.choosing.gates import GateGradientScores as GateGradientScores
from headwise.verbs.choosing.layers import block_shapes as block_shapes
from headwise.verbs.choosing.layers import cuttable as cuttable
from headwise.verbs.choosing.layers import layer_costs as layer_costs
from headwise.verbs.choosing.layers import output_weights as output_weights
from headwise.verbs.choosing.quality import Quality as Quality
from headwise.verbs.choosing.standing import check_savings as check_savings
from headwise.verbs.choosing.standing import rounded as rounded
from headwise.verbs.choosing.standing import standing as standing
from headwise.verbs.choosing.text import Part as Part
from headwise.verbs.choosing.text import sample as sample
from headwise.verbs.choosing.timing import layer_seconds as layer_seconds
