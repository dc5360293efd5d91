"""Configuration of distributed tracing: spans by OTLP to a collector."""

from typing import Annotated

import msgspec

from headrace.core.config.flag import TELEMETRY, Flag


class TracingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Spans of requests, sent to a collector of OpenTelemetry. Environment variables are those of its specification."""

    endpoint: Annotated[
        str,
        Flag(
            "otlp-traces-endpoint",
            TELEMETRY,
            "URL of a collector that takes spans by OTLP over HTTP, such as http://127.0.0.1:4318; needs pip install "
            "'headrace[tracing]' (default: no tracing)",
            variable="OTEL_EXPORTER_OTLP_ENDPOINT",
        ),
    ] = ""
    headers: Annotated[
        tuple[str, ...],
        Flag(
            "otlp-header",
            TELEMETRY,
            "NAME=VALUE: HTTP header for the collector, such as an API key; other characters percent-encoded",
            secret=True,
            variable="OTEL_EXPORTER_OTLP_HEADERS",
        ),
    ] = ()
    """Parsed by core/types/named_values.py, as are the attributes."""
    sample_ratio: Annotated[
        float,
        Flag(
            "trace-sample-ratio",
            TELEMETRY,
            "share of the requests without a traceparent header whose spans are recorded; others follow their header",
            low=0,
            high=1,
            unit="share",
            variable="OTEL_TRACES_SAMPLER_ARG",
        ),
    ] = 1.0
    service_name: Annotated[
        str,
        Flag(
            "trace-service-name",
            TELEMETRY,
            "service.name of the spans (default: headrace-prefill, headrace-decode or headrace-colocated)",
            variable="OTEL_SERVICE_NAME",
        ),
    ] = ""
    attributes: Annotated[
        tuple[str, ...],
        Flag(
            "trace-attribute",
            TELEMETRY,
            "NAME=VALUE: attribute of this server in its traces, such as deployment.environment.name=test",
            variable="OTEL_RESOURCE_ATTRIBUTES",
        ),
    ] = ()
