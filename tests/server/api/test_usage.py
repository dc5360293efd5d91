"""Usage in responses: cached tokens by where they were."""

import msgspec

from headrace.core.types.kv.kv_tiers import TierTokens
from headrace.core.types.requests.request import Usage
from headrace.server.api.response.usage import usage_report


def test_cached_tokens_of_all_prompts_are_told_by_tier() -> None:
    usages = [Usage(20, 1, 16, TierTokens(host=4, disk=8)), Usage(10, 1, 8)]
    details = msgspec.to_builtins(usage_report(usages, 2).prompt_tokens_details)
    assert details == {"cached_tokens": 24, "cached_tokens_details": {"device": 12, "host": 4, "disk": 8}}


def test_nothing_is_said_of_tiers_where_none_was_read() -> None:
    details = msgspec.to_builtins(usage_report([Usage(20, 1, 16)], 1).prompt_tokens_details)
    assert details == {"cached_tokens": 16}
