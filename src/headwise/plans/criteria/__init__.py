"""Ways to say which head goes next, one small file each, all on one interface."""

from headwise.plans.criteria.criterion import Criterion as Criterion
from headwise.plans.criteria.criterion import Evaluator as Evaluator
from headwise.plans.criteria.criterion import GateScores as GateScores
from headwise.plans.criteria.criterion import Sensitivity as Sensitivity
from headwise.plans.criteria.fisher import Fisher as Fisher
from headwise.plans.criteria.greedy import Greedy as Greedy
from headwise.plans.criteria.lazy import Lazy as Lazy
from headwise.plans.criteria.leave_one_out import LeaveOneOut as LeaveOneOut
from headwise.plans.criteria.michel import Michel as Michel
from headwise.plans.criteria.random import RandomOrder as RandomOrder
from headwise.plans.criteria.set_aware import SetAware as SetAware
from headwise.plans.criteria.weight_norm import WeightNorm as WeightNorm
