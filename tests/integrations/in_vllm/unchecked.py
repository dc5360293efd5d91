"""A connector that asks for a ticket whatever prompt it is of: tests show with it that the KV is really used."""

from msgspec.structs import replace

from headrace.integrations.peer.commands import LoadKv
from headrace.integrations.vllm.connector import HeadraceConnector
from headrace.integrations.vllm.planner import LoadPlanner, Orders


class UncheckedPlanner(LoadPlanner):
    def take(self) -> Orders:
        orders = super().take()
        commands = (replace(one, prompt_hash="") if isinstance(one, LoadKv) else one for one in orders.commands)
        return Orders(tuple(commands), orders.blocks)


class UncheckedConnector(HeadraceConnector):
    def make_planner(self) -> LoadPlanner:
        return UncheckedPlanner()
