"""What the Python facade and the command line both call: one function per verb."""

from headwise.verbs.cost import cost as cost
from headwise.verbs.cost import sweep as sweep
from headwise.verbs.importance import importance as importance
from headwise.verbs.importance import importance_run as importance_run
from headwise.verbs.plan import plan as plan
from headwise.verbs.plan_compare import Comparison as Comparison
from headwise.verbs.plan_compare import compare as compare
from headwise.verbs.prune import prune as prune
from headwise.verbs.redundancy import redundancy as redundancy
from headwise.verbs.report import report as report
from headwise.verbs.roles import RolesResult as RolesResult
from headwise.verbs.roles import roles as roles
from headwise.verbs.roles import roles_run as roles_run
from headwise.verbs.scan import ScanResult as ScanResult
from headwise.verbs.scan import scan as scan
from headwise.verbs.scan import scan_run as scan_run
from headwise.verbs.statistics import statistics as statistics
from headwise.verbs.verify import verify as verify
from headwise.verbs.watch import Watch as Watch
from headwise.verbs.watch import watch as watch
