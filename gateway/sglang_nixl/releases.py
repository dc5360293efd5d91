"""Releases of SGLang that the gateway serves. Pure.

A new release needs a row here and a run of its tests: `make test-sglang`. Its messages name no release, so an engine is
asked over HTTP.
"""

RELEASES = ("0.5.23",)
