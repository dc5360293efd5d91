"""What Prometheus' Alertmanager posts to a webhook, as far as it is needed to record on an alert."""

from typing import Literal

import msgspec

from headrace.core.types.errors import first_of, shown

NAME_CHARS = 60  # of an alert, in the log and in a file's header
Status = Literal["firing", "resolved"]


class NotifiedAlert(msgspec.Struct, frozen=True):
    """One alert of a group."""

    status: Status
    labels: dict[str, str]
    """alertname is the name of its rule."""


class AlertNotification(msgspec.Struct, frozen=True):
    """Body of the request: the webhook of Alertmanager, of which other fields are ignored."""

    version: Literal["4"]
    status: Status
    """Of the group: firing if one of its alerts is."""
    alerts: list[NotifiedAlert]

    @property
    def firing(self) -> str:
        """The names of alerts that fire, in words; "" for none."""
        found = {alert.labels.get("alertname", "") for alert in self.alerts if alert.status == "firing"}
        names = ["".join(filter(str.isprintable, shown(name, NAME_CHARS))) or "unnamed" for name in sorted(found)]
        return first_of(names)
