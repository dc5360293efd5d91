"""The table of user settings. A row makes a TOML key and a flag; the field it fills has the type and the default."""

from headrace.server.config.settings.computing import COMPUTING
from headrace.server.config.settings.handoff import HANDOFF
from headrace.server.config.settings.serving import SERVING
from headrace.server.config.settings.setting import Kind, Setting

__all__ = ["BY_KEY", "SETTINGS", "Kind", "Setting"]

SETTINGS: tuple[Setting, ...] = (*SERVING, *COMPUTING, *HANDOFF)
BY_KEY: dict[str, Setting] = {setting.key: setting for setting in SETTINGS}
