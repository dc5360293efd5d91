"""What a decode server sends to prefill servers of other releases, which refuse fields that they do not know."""

import msgspec
import pytest

from headrace.core.messages.frontend import Submit
from headrace.core.messages.http_prefill import PrefillRequest
from headrace.core.types.requests.request import SamplingParams
from headrace.core.types.requests.terms import RequestTerms
from headrace.server.api.native.prefill_routes import PrefillReply
from headrace.server.api.request.sampling import sampling_params
from headrace.server.api.request.schema import PrefillBody
from headrace.server.api.response.hidden_format import HiddenStatesReply
from headrace.server.frontend.generation.prefill_body import prefill_body
from headrace.server.frontend.request.generation_request import GenerationRequest
from headrace.server.upstream.prefill_call import HiddenField, PrefillResponse
from headrace.text.tokenizer import Tokenizer
from tests.server.fake_prefills import Prefills, decode, fetched
from tests.server.fakes import FakeLink, in_loop

FIRST_RELEASE = {"rid", "ticket", "prompt_token_ids", "stop", "ignore_eos", "priority", "cache_salt", "stream"}


def test_a_request_without_parameters_needs_no_field_that_was_added_later() -> None:
    body = prefill_body(GenerationRequest(rid="r", prompt=(1, 2), sampling=SamplingParams()), "t", knows_start=True)
    assert msgspec.json.decode(body.encoded()).keys() <= FIRST_RELEASE


def test_every_field_is_one_that_this_release_knows_and_says_the_same_there() -> None:
    sampling = SamplingParams(
        temperature=0.5, top_k=3, top_p=0.5, min_p=0.1, seed=1, max_tokens=2, min_tokens=1, stop_token_ids=(5,),
        logprobs=1, prompt_logprobs=1, prompt_logprobs_start=1, presence_penalty=-0.5, frequency_penalty=2.0,
        repetition_penalty=1.5, logit_bias=((5, -100.0), (7, 0.25)),
    )  # fmt: skip
    terms = RequestTerms(slo_ttft_s=1.0, deadline_s=2.0, cache_salt="s", session="digest")
    request = GenerationRequest(rid="r", prompt=(1, 2), sampling=sampling, stop=("x",), terms=terms)
    assert "session_id" not in msgspec.json.decode(prefill_body(request, "t", knows_start=True).encoded())
    body = prefill_body(request, "t", knows_start=True, knows_session_id=True)
    there = msgspec.json.decode(body.encoded(), type=PrefillBody)
    assert (there.rid, there.session_id) == ("r", "digest")
    assert sampling_params(there, logprobs=there.logprobs, max_tokens=16, vocab_size=9) == sampling
    assert msgspec.json.decode(body.encoded()).keys() > FIRST_RELEASE


def test_what_clients_may_send_and_read_is_what_servers_read_and_send() -> None:
    internal = {"grammar", "label_token_ids"}  # of stages, and of scores, which no other server computes
    assert set(PrefillRequest.__struct_fields__) - internal <= set(PrefillBody.__struct_fields__)
    assert set(PrefillResponse.__struct_fields__) <= set(PrefillReply.__struct_fields__)
    assert set(HiddenField.__struct_fields__) == set(HiddenStatesReply.__struct_fields__)


@pytest.mark.parametrize("knows", [False, True])
@in_loop
async def test_a_session_goes_on_at_prefill_servers_that_know_it_and_names_of_any_length_are_digests(
    knows: bool, tokenizer: Tokenizer
) -> None:
    prefills, link = Prefills(), FakeLink(fetched(tokenizer))
    prefills.more = {"session_id": True} if knows else {}
    async with decode(link, tokenizer, prefills) as (_, http):
        for names in ({"session_id": "s" * 5000}, {"session_id": "s" * 5000, "prompt_cache_key": "k"}, {}):
            await http.post("/v1/completions", json={"prompt": [1, 1, 1, 1], **names})
    digest, both, none = (submit.terms.session for submit in link.of(Submit))
    assert (both, none, len(digest)) == (digest, "", 32)
    sent = [body.get("session_id") for _, body, *_ in prefills.posts]
    assert sent == ([digest, digest, None] if knows else [None, None, None])
