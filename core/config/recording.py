"""Configuration of the flight recorder: where the last minutes of the scheduler's decisions are kept."""

from typing import Annotated

import msgspec

from headrace.core.config.flag import TELEMETRY, Flag


class RecordingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What is recorded of the scheduler (docs/flight-recorder.md)."""

    folder: Annotated[
        str,
        Flag(
            "record",
            TELEMETRY,
            "folder in which the last minutes of the scheduler's events and decisions are kept, and the files that are "
            "written of them (default: nothing is recorded)",
        ),
    ] = ""
    minutes: Annotated[
        int, Flag("record-minutes", TELEMETRY, "with --record: minutes that are kept at least", low=1, high=120)
    ] = 5
    tokens: Annotated[
        bool,
        Flag(
            "record-tokens",
            TELEMETRY,
            "with --record: keep token ids, cache salts and constraints as they are; otherwise others are in their "
            "places",
        ),
    ] = False
