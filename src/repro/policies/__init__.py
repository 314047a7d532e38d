"""Decisions only: which expert is kept at which width, from arrays to wishes.

The one idea: a policy is a pure function of what it is shown, with a moving average as its only
memory.  It knows neither bytes on a device nor a clock of its own, so serving, quality runs,
trace replay and the simulator all run the same code.

Start with :func:`make_policy`; ``base`` says what the engine may ask.
"""

from repro.policies.base import ServingPolicy, Traits
from repro.policies.inventory import Inventory, PolicyBudgetError, PolicyInputError
from repro.policies.registry import POLICIES, make_policy, policy_options, traits
from repro.policies.residual import HeadCoefficients, ResidualHeads

__all__ = [
    "HeadCoefficients",
    "Inventory",
    "POLICIES",
    "PolicyBudgetError",
    "PolicyInputError",
    "ResidualHeads",
    "ServingPolicy",
    "Traits",
    "make_policy",
    "policy_options",
    "traits",
]
