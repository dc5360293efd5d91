"""Between the scheduler and the part of its process that has copies of it run ahead in virtual time."""

import msgspec

from headrace.core.types.forecast import Forecast


class MakeForecast(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Copy the scheduler as it is now, and have the copies look ahead. Answered by ForecastMade."""

    seed: int
    """Of what is drawn at random."""

    steps: int
    """That all copies together may take, about."""


class ForecastMade(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answer to the last MakeForecast."""

    forecast: Forecast | None
    """None: no child could be had, or it has failed or taken too long."""
