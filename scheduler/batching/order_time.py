"""When to order the next forward pass: shortly before the first stage has computed those that it was given.

    first stage    ├──── pass 1 ────┤├──── pass 2 ────┤
    ordered        1              2 ▲               3 ▲      the stage finds its next pass when it asks for it
    arrivals         ├── in pass 2 ─┤├── in pass 3 ──┤

A pass that is ordered as soon as there is a credit keeps out what arrives while the one before it is computed.
"""

from math import inf

from headrace.scheduler.costs.cost_model import CostModel
from headrace.scheduler.state.plan_table import PlanTable

LEAD_S = 0.003
"""For planning, and for the order to reach the stages."""

MARGIN = 0.05
"""Share by which passes may be shorter than predicted. One that is still shorter leaves the stage idle while its report
and the next order are on their way."""

LONG_S = 0.2
"""Passes that are longer are not ordered ahead: the stage is idle for about a hundredth of their time, and they vary by
more."""


def order_at(plans: PlanTable, costs: CostModel) -> float | None:
    """Time at which the next pass is to be ordered, unless those before it are done sooner; None for at once.

    Passes with decode rows are not waited for: the cost model does not predict them, and they are short.
    """
    ahead = list(plans.of_first_stage())
    if not ahead or not costs.trusted or any(plan.decode_rows for plan in ahead):
        return None
    seconds = sum(costs.first_stage_s(plan.load) for plan in ahead)
    return inf if seconds > LONG_S * len(ahead) else plans.first_begun + (1 - MARGIN) * seconds - LEAD_S
