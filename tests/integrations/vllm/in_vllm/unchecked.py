"""A connector that loads a ticket even for another prompt: tests prove with it that the KV is really used."""

from msgspec.structs import replace

from headrace.integrations.vllm.connector import HeadraceConnector
from headrace.integrations.vllm.planner import LoadPlanner, StepCommands
from headrace.peer.commands import LoadKv


class UncheckedPlanner(LoadPlanner):
    def take_commands(self) -> StepCommands:
        step = super().take_commands()
        commands = (replace(one, prompt_hash="") if isinstance(one, LoadKv) else one for one in step.commands)
        return StepCommands(tuple(commands), step.blocks)


class UncheckedConnector(HeadraceConnector):
    def make_planner(self) -> LoadPlanner:
        return UncheckedPlanner()
