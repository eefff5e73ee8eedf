"""A plan and a model into a smaller model: cut, prove, repair, verify. It does not care why these heads go."""

from headwise.models.surgery_record import BlockChange as BlockChange
from headwise.models.surgery_record import LayerProof as LayerProof
from headwise.models.surgery_record import Proof as Proof
from headwise.models.surgery_record import SurgeryRecord as SurgeryRecord
from headwise.surgery.foresight import stock_repair as stock_repair
from headwise.surgery.healing import Healing as Healing
from headwise.surgery.healing import heal as heal
from headwise.surgery.keeping import Kept as Kept
from headwise.surgery.keeping import fused_rows as fused_rows
from headwise.surgery.keeping import kept_of as kept_of
from headwise.surgery.prune import prune as prune
from headwise.surgery.repair import INTERCEPTS as INTERCEPTS
from headwise.surgery.repair import METHODS as METHODS
from headwise.surgery.repair import REFITS as REFITS
from headwise.surgery.repair import Moments as Moments
from headwise.surgery.repair import solve as solve
from headwise.surgery.request import Request as Request
from headwise.surgery.request import request_of as request_of
from headwise.surgery.verify import Verification as Verification
from headwise.surgery.verify import verify as verify
from headwise.surgery.watching import gating as gating
from headwise.surgery.watching import place_of as place_of
