"""The claims about multi-head attention, each an experiment with a number and a verdict.

An experiment measures quantities over several seeds; a rule that is part of its definition turns
them into one of three verdicts: holds, holds under a condition (named), does not hold as stated.

Example:
    >>> from headwise import lab
    >>> lab.CATALOGUE[0].name
    'sum-of-scores'
"""

from headwise.lab.catalogue import CATALOGUE as CATALOGUE
from headwise.lab.catalogue import Entry as Entry
from headwise.lab.catalogue import find as find
from headwise.lab.experiment import Experiment as Experiment
from headwise.lab.experiment import Findings as Findings
from headwise.lab.outcome import Literature as Literature
from headwise.lab.outcome import Outcome as Outcome
from headwise.lab.page import write_page as write_page
from headwise.lab.quantity import Quantity as Quantity
from headwise.lab.rule import Check as Check
from headwise.lab.rule import Rule as Rule
from headwise.lab.rule import Threshold as Threshold
from headwise.lab.rule import Verdict as Verdict
from headwise.lab.running import definition as definition
from headwise.lab.running import judge as judge
from headwise.lab.running import run as run
from headwise.lab.running import run_all as run_all
