"""A connector that asks for a ticket whatever prompt it is of: tests show with it that the KV is really used."""

from headrace_vllm.connector import HeadraceConnector
from headrace_vllm.peer.commands import Load
from headrace_vllm.planner import Orders, Planner
from msgspec.structs import replace


class UncheckedPlanner(Planner):
    def take(self) -> Orders:
        orders = super().take()
        commands = (replace(one, prompt_hash="") if isinstance(one, Load) else one for one in orders.commands)
        return Orders(tuple(commands), orders.blocks)


class UncheckedConnector(HeadraceConnector):
    def make_planner(self) -> Planner:
        return UncheckedPlanner()
