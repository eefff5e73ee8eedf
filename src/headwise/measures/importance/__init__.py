"""How much each head matters for a loss: gate gradients, Fisher information, exact ablation."""

from headwise.measures.importance.ablation import Ablator as Ablator
from headwise.measures.importance.ablation import Rise as Rise
from headwise.measures.importance.choosing import LOSSES as LOSSES
from headwise.measures.importance.choosing import loss_for as loss_for
from headwise.measures.importance.collecting import ExampleMoments as ExampleMoments
from headwise.measures.importance.collecting import ablation_info as ablation_info
from headwise.measures.importance.collecting import gradient_infos as gradient_infos
from headwise.measures.importance.edits import ABLATIONS as ABLATIONS
from headwise.measures.importance.edits import OutputBank as OutputBank
from headwise.measures.importance.fidelity import Fidelity as Fidelity
from headwise.measures.importance.fidelity import Projection as Projection
from headwise.measures.importance.gradients import GateGradients as GateGradients
from headwise.measures.importance.gradients import frozen as frozen
from headwise.measures.importance.gradients import gate_gradients as gate_gradients
from headwise.measures.importance.losses import CustomLoss as CustomLoss
from headwise.measures.importance.losses import Labels as Labels
from headwise.measures.importance.losses import Loss as Loss
from headwise.measures.importance.losses import MaskedToken as MaskedToken
from headwise.measures.importance.losses import NextToken as NextToken
from headwise.measures.importance.losses import Target as Target
from headwise.measures.importance.losses import Task as Task
from headwise.measures.importance.passages import generator_for as generator_for
from headwise.measures.importance.passages import named as named
from headwise.measures.importance.passages import passage_keys as passage_keys
from headwise.measures.importance.replay import Replay as Replay
