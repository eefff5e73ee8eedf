"""What heads cost: parameters, operations, cache bytes and memory traffic, from numbers alone."""

from headwise.costs.cache import SiteCache as SiteCache
from headwise.costs.cache import site_cache as site_cache
from headwise.costs.cache import token_elements as token_elements
from headwise.costs.dtypes import BYTES as BYTES
from headwise.costs.dtypes import bytes_of as bytes_of
from headwise.costs.dtypes import dtype_name as dtype_name
from headwise.costs.flops import AttentionWork as AttentionWork
from headwise.costs.flops import attention_work as attention_work
from headwise.costs.flops import visible_pairs as visible_pairs
from headwise.costs.ledger import Ledger as Ledger
from headwise.costs.ledger import ledger as ledger
from headwise.costs.numbers import AttentionNumbers as AttentionNumbers
from headwise.costs.numbers import Latent as Latent
from headwise.costs.numbers import ModelNumbers as ModelNumbers
from headwise.costs.numbers import Relative as Relative
from headwise.costs.numbers import Rest as Rest
from headwise.costs.numbers import grid as grid
from headwise.costs.parameters import BlockParameters as BlockParameters
from headwise.costs.parameters import block_parameters as block_parameters
from headwise.costs.spread import logit_spread as logit_spread
from headwise.costs.sweep import SWEEPS as SWEEPS
from headwise.costs.sweep import Sweep as Sweep
from headwise.costs.sweep import check_sweep as check_sweep
from headwise.costs.sweep import sweep as sweep
from headwise.costs.traffic import Traffic as Traffic
