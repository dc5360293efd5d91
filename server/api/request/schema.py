"""Request bodies: the fields that are served. Others are in other_fields.py.

Wrong types and values out of range are refused while decoding; what depends on the model or on other fields is checked
in sampling.py and prompts.py.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from headrace.core.types.requests.kv_hints import KvHintsEnvelope
from headrace.core.types.requests.request import HiddenWanted
from headrace.core.types.requests.resume import Resume
from headrace.server.http.ranges import (
    Alternatives,
    Biases,
    Choices,
    DeadlineS,
    DraftTopK,
    Effort,
    Labels,
    MaxTokens,
    MaxTokensOrNone,
    MinP,
    MinTokens,
    ObjectiveMs,
    Penalty,
    Position,
    PositionOrNone,
    Priority,
    Repetition,
    Replica,
    Retention,
    Salt,
    ScoreTemperature,
    Seed,
    Stop,
    StopIds,
    Temperature,
    TopK,
    TopN,
    TopP,
)
from headrace.server.upstream.handoff_params import MAX_TICKET_CHARS, HandoffParams, TokenId, TransferParams


class ImageUrl(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """image_url of a part."""

    url: str
    """A data URL in base64."""


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One part of a message's content: text, or an image of a user's message."""

    type: str
    text: str | None = None
    image_url: ImageUrl | str | None = None
    """The image of a part of type image_url; of type input_image, its URL, in POST /v1/responses."""
    refusal: str | None = None
    """The text of a part of type refusal."""


class CalledFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """function of a tool call."""

    name: str
    arguments: str | None = None
    """A JSON object, as text."""


class ToolCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A call that the assistant has made."""

    id: str
    function: CalledFunction
    type: str | None = None
    """function."""


class ChatMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One message of a conversation."""

    role: str
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    """Of the assistant: calls that it has made."""
    tool_call_id: str | None = None
    """Of role tool: the call that this is the result of."""
    refusal: str | None = None
    """Of the assistant: what it has said in the place of content."""
    reasoning_content: str | None = None
    """Of the assistant: how it came to its answer, which is part of the prompt where the chat template says so."""
    reasoning: str | None = None
    """vLLM's name of reasoning_content."""


class Function(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """function of a tool."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema of its arguments; None for a function without any."""
    strict: bool | None = None
    """Whether calls keep to the schema with tool_choice auto; with required ones they always do."""


class Tool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A function that the model may call."""

    function: Function
    type: str | None = None
    """function."""


class ChosenFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """function of a tool_choice."""

    name: str


class ToolChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tool_choice that names a function."""

    function: ChosenFunction
    type: str | None = None
    """function."""


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the generated text has to match: exactly one of these."""

    json: dict[str, Any] | bool | str | None = None
    """A JSON schema, or its text."""
    regex: str | None = None
    """A regular expression that matches the whole text."""
    choice: list[str] | None = None
    """The text is one of these."""
    grammar: str | None = None
    """In GBNF (llama.cpp's EBNF) or Lark."""
    json_object: bool | None = None
    """Any JSON object."""


class JsonSchemaFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """json_schema of a response_format."""

    schema: dict[str, Any] | bool | str | None = None
    """A JSON schema, or its text."""


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's field of structured outputs."""

    type: str | None = None
    """text, json_object or json_schema."""
    json_schema: JsonSchemaFormat | None = None


class TextFormat(JsonSchemaFormat, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """text.format of POST /v1/responses."""

    type: str | None = None
    """text, json_object or json_schema."""


class TextOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """text of POST /v1/responses."""

    format: TextFormat | None = None


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are chosen and what ends the text: fields that have one name on all routes. None means the default."""

    temperature: Temperature | None = None
    top_k: TopK | None = None
    """0 and -1 mean all tokens."""
    top_p: TopP | None = None
    """0 means the most likely token alone, as in OpenAI's API."""
    min_p: MinP | None = None
    presence_penalty: Penalty | None = None
    """Subtracted from the logits of tokens that were generated before."""
    frequency_penalty: Penalty | None = None
    """Subtracted from the logit of a token as often as it was generated before."""
    repetition_penalty: Repetition | None = None
    """Logits of tokens of the prompt and of generated ones are divided by it, negative ones multiplied."""
    logit_bias: Biases | None = None
    """Token ids, and what is added to their logits."""
    stop: Stop | None = None
    """Strings that end the text and are not part of it; an empty one in the place of a list is none."""
    stop_token_ids: StopIds | None = None
    """Tokens that end the text and are not part of it."""
    ignore_eos: bool | None = None
    """Continue after EOS."""


class SamplingBody(SamplingFields, frozen=True, kw_only=True):
    """Fields of all routes but POST /generate. None means the default."""

    seed: Seed | None = None
    max_tokens: MaxTokens | None = None
    min_tokens: MinTokens | None = None
    prompt_logprobs: Alternatives | None = None
    """Number of alternatives for each prompt token; None for no logprobs."""
    prompt_logprobs_start: Position | None = None
    """The first prompt position with logprobs, from 0; the prefix cache serves what is before it."""
    priority: Priority | None = None
    """Lower ones go before all higher ones; --policy fcfs ignores it."""
    slo_ttft_ms: ObjectiveMs | None = None
    """Milliseconds within which the client would like its first token, under --policy slo."""
    deadline_s: DeadlineS | None = None
    """Seconds after which the request fails with 504."""
    data_parallel_rank: Replica | None = None
    """The data-parallel replica that is to compute it; None for the one with the least load."""
    cache_salt: Salt | None = None
    """Cached prefixes are shared only among requests with the same cache_salt and extra_key."""
    extra_key: Salt | None = None
    """SGLang's name for a second salt."""
    kv_hints: KvHintsEnvelope | None = None
    """What is to become of the prompt's KV: see "KV hints" in docs/scheduling.md."""
    prompt_cache_retention: Retention | None = None
    """24h asks to retain the KV for a day, as an action of kv_hints does; other values ask for nothing."""
    session_id: str | None = None
    """Name of the conversation. Where it had pauses before, its KV is retained until its next turn is expected."""
    prompt_cache_key: str | None = None
    """OpenAI's name of session_id, which goes before it."""
    structured_outputs: StructuredOutputs | None = None
    """What the text has to match."""
    guided_json: dict[str, Any] | bool | str | None = None
    """Earlier name of structured_outputs.json; the next three are likewise."""
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    model: str | None = None
    stream: bool | None = None


class PrefillFields(SamplingBody, frozen=True, kw_only=True):
    """Fields of POST /v1/prefill beside the prompt."""

    chat_template_kwargs: dict[str, Any] | None = None
    """See ChatBody; so are the next three."""
    reasoning_effort: Effort | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    max_tokens: MaxTokensOrNone | None = None
    """0 for the KV of the prompt alone: the response has no first token."""
    logprobs: Alternatives | None = None
    """Number of alternatives for the first token; None for no logprobs."""
    hidden_states: HiddenWanted | None = None
    """Tokens of the prompt whose hidden states are in the response."""
    draft_top_k: DraftTopK | None = None
    """Most likely first tokens, with their probabilities, in the response."""
    ticket: str | None = None
    """Name under which a decode peer fetches the KV."""
    handoff: str | None = None
    """"hold" to hold the KV for the peer under a lease, "none" to drop it."""
    cached_only: bool | None = None
    """Compute nothing: the KV of all tokens is in the prefix cache, tiers included, or the request is refused (412)."""
    adapter: Annotated[str, Meta(max_length=64)] | None = None
    """Fingerprint of the LoRA adapter that model names, as the decode server has it; another one is refused."""
    resume: Resume | None = None
    """What the decode server has of the prompt's KV, since another prefill server has failed it: see
    docs/resume.md."""
    rid: str | None = None
    """Request id; made up if it is not given."""

    @property
    def prompt_only(self) -> bool:
        """The KV of the prompt is wanted, and no first token."""
        return self.max_tokens == 0 or bool(self.cached_only)


class PrefixesBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of POST /v1/prefixes."""

    prompt_token_ids: list[TokenId]
    model: str | None = None
    cache_salt: Salt | None = None
    """That of the requests whose KV is meant."""


class AuditsBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of POST /v1/audits: a prompt, and the positions of which the KV is to be digested."""

    prompt_token_ids: list[TokenId]
    start: Annotated[int, Meta(ge=0)]
    end: Annotated[int, Meta(ge=1)]
    """Of the positions [start, end); no token behind them matters."""
    model: str | None = None


class ReturnsBody(PrefixesBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/returns: the tokens whose KV a decode server offers."""

    ticket: Annotated[str, Meta(min_length=1, max_length=MAX_TICKET_CHARS)]
    """Under which the decode server sends the KV."""
    control_port: Annotated[int, Meta(ge=1, le=65535)]
    """Of the decode server's control endpoint, on the host that the request comes from."""


class PrefillBody(PrefillFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/prefill. Exactly one of prompt, prompt_token_ids and messages is given."""

    prompt: str | list[TokenId] | None = None
    """A text, or token ids, as of prompt_token_ids."""
    prompt_token_ids: list[TokenId] | None = None
    images: list[str] | None = None
    """Images of prompt_token_ids, which has all of their tokens, as data URLs in the order of their places."""
    messages: list[ChatMessage] | None = None
    open: bool | None = None
    """The prompt is to grow: it is computed as it comes, and the response has the id under which it is appended to and
    committed. Other fields are those of the commit, unless that has them, too."""


class CommitBody(PrefillFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/prefill/{id}/commit: fields of POST /v1/prefill in the place of those of the opening."""


class AppendBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of PATCH /v1/prefill/{id}."""

    append: str | list[TokenId | ChatMessage]
    """What the open prompt goes on with: a text, token ids or messages, as it has begun."""


class TruncateBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/prefill/{id}/truncate. Exactly one of both is given."""

    tokens: Position | None = None
    """Tokens of the prompt that stay; a text ends behind the last of them."""
    messages: Position | None = None
    """Messages that stay."""


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of a stream."""

    include_usage: bool | None = None
    """End with a chunk of usage."""
    include_progress: bool | None = None
    """Add chunks without choices that say how far the prefill is. Headrace only."""


class OpenAIBody(SamplingBody, frozen=True, kw_only=True):
    """Fields of all OpenAI routes. The last four name a KV handoff (see HandoffFields)."""

    include_stop_str_in_output: bool | None = None
    """The stop string or token that ends the text is part of it."""
    no_stop_trim: bool | None = None
    """SGLang's name of include_stop_str_in_output."""

    n: Choices | None = None
    """Continuations of each prompt."""
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    json_schema: dict[str, Any] | bool | str | None = None
    """SGLang's name of structured_outputs.json; the next two are regex and grammar there."""
    regex: str | None = None
    ebnf: str | None = None
    kv_transfer_params: TransferParams | None = None
    bootstrap_host: str | list[str | None] | None = None
    bootstrap_port: int | list[int | None] | None = None
    bootstrap_room: int | list[int] | None = None


class OpenFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """headrace of a body: what it does with an open prompt."""

    open: bool | None = None
    """The prompt is to grow: it is computed as it comes, and nothing is generated. The response's id is that of the
    open prompt."""
    open_id: str | None = None
    """The open prompt that this one is appended to. Without open it is committed, and continued."""


class GrowingBody(OpenAIBody, frozen=True, kw_only=True):
    """Fields of routes whose prompts may be open."""

    headrace: OpenFields | None = None
    """Headrace only: open, open_id."""


class CompletionBody(GrowingBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/completions."""

    prompt: str | list[str | TokenId | list[TokenId]]
    echo: bool | None = None
    """The prompt comes before the text, and with logprobs its logprobs before those of the text."""
    return_token_ids: bool | None = None
    """Choices have prompt_token_ids and token_ids, the token that ended the text included."""
    max_tokens: MaxTokensOrNone | None = None
    """0, which needs echo, scores the prompt alone."""
    max_completion_tokens: MaxTokens | None = None
    """Takes the place of max_tokens, as llm-d's sidecar has it on all routes."""
    logprobs: Alternatives | None = None
    best_of: Choices | None = None
    """Continuations of each prompt that are generated; the n with the highest mean logprob are returned."""

    @property
    def prompt_only(self) -> bool:
        """The prompts are to be scored, and nothing is to follow them."""
        return self.max_tokens == 0


class ChatBody(GrowingBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/chat/completions."""

    messages: list[ChatMessage]
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables of the template, such as enable_thinking."""
    reasoning_effort: Effort | None = None
    """A variable of the template, as is enable_thinking: false for "none"."""
    add_generation_prompt: bool | None = None
    """false: the prompt ends behind the last message, not where an answer begins."""
    continue_final_message: bool | None = None
    """The answer continues the last message."""
    include_reasoning: bool | None = None
    """false: the answer comes without its reasoning."""
    separate_reasoning: bool | None = None
    """false: reasoning is not told from content."""
    return_token_ids: bool | None = None
    """The response has prompt_token_ids, and choices token_ids, the token that ended the text included."""
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None
    max_completion_tokens: MaxTokens | None = None
    """Takes the place of max_tokens."""
    tools: list[Tool] | None = None
    """Functions that the model may call."""
    tool_choice: str | ToolChoice | None = None
    """none, auto, required, or a function that is to be called."""
    parallel_tool_calls: bool | None = None
    """Whether there may be several calls in one answer."""


class InputItem(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One item of the input of POST /v1/responses: a message, a call, the result of one, or earlier reasoning."""

    role: str = ""
    content: str | list[Part] | None = None
    name: str | None = None
    """Of a call: its function."""
    call_id: str | None = None
    """Of a call and its result."""
    arguments: str | None = None
    """Of a call: a JSON object, as text."""
    output: str | list[Part] | None = None
    """The result of a call."""
    type: str = "message"


class ResponseTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A function that the model of POST /v1/responses may call. It has the fields of Function."""

    type: str
    """function."""
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseToolChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tool_choice of POST /v1/responses that names a function."""

    type: str
    """function."""
    name: str | None = None


class ReasoningOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """reasoning of POST /v1/responses."""

    effort: Effort | None = None
    """As reasoning_effort of POST /v1/chat/completions."""


class ResponsesBody(OpenAIBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/responses."""

    input: str | list[InputItem]
    reasoning: ReasoningOptions | None = None
    instructions: str | None = None
    """A system message before the input."""
    max_output_tokens: MaxTokens | None = None
    text: TextOptions | None = None
    tools: list[ResponseTool] | None = None
    """Functions that the model may call."""
    tool_choice: str | ResponseToolChoice | None = None
    """none, auto, required, or a function that is to be called."""
    parallel_tool_calls: bool | None = None
    """Whether there may be several calls in one answer."""


class GenerateSampling(SamplingFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """sampling_params of POST /generate."""

    sampling_seed: Seed | None = None
    max_new_tokens: MaxTokens | None = None
    min_new_tokens: MinTokens | None = None
    no_stop_trim: bool | None = None
    """The stop string or token that ends the text is part of it."""
    n: Choices | None = None
    json_schema: str | None = None
    """What the text has to match; so do the next two, of which one may be given."""
    regex: str | None = None
    ebnf: str | None = None


class GenerateBody(HandoffParams, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /generate. Exactly one of text and input_ids is given."""

    text: str | list[str] | None = None
    input_ids: list[TokenId | list[TokenId]] | None = None
    sampling_params: GenerateSampling | None = None
    return_logprob: bool | None = None
    logprob_start_len: PositionOrNone | None = None
    """0 or more adds logprobs of the prompt after this position; the prefix cache serves what is before it."""
    top_logprobs_num: Alternatives | None = None
    return_hidden_states: bool | None = None
    """Of the prompt, and of generated tokens."""
    rid: str | list[str] | None = None
    cache_salt: Salt | list[Salt] | None = None
    """For all prompts, or one for each; so is extra_key."""
    extra_key: Salt | list[Salt] | None = None
    kv_hints: KvHintsEnvelope | None = None
    session_id: str | None = None
    """Name of the conversation. Where it had pauses before, its KV is retained until its next turn is expected."""
    priority: Priority | None = None
    slo_ttft_ms: ObjectiveMs | None = None
    data_parallel_rank: Replica | None = None
    model: str | None = None
    stream: bool | None = None
    incremental_streaming_output: bool | None = None
    """In a stream each event has what is new alone; as under SGLang's flag of that name."""


class ExtraArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """extra_args of sampling_params: the place of kv_transfer_params that all of vLLM's versions read."""

    kv_transfer_params: TransferParams | None = None


class TokenSampling(SamplingFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """sampling_params of POST /inference/v1/generate: vLLM's SamplingParams."""

    n: Choices | None = None
    """Continuations of the prompt."""
    seed: Seed | None = None
    max_tokens: MaxTokens | None = None
    """None for the room that the prompt leaves."""
    min_tokens: MinTokens | None = None
    logprobs: Alternatives | None = None
    """Number of alternatives for each token; None for no logprobs."""
    prompt_logprobs: Alternatives | None = None
    include_stop_str_in_output: bool | None = None
    """The stop string or token that ends the text is part of it; of output_mode "text" alone."""
    structured_outputs: StructuredOutputs | None = None
    """What the text has to match, from its first token on."""
    extra_args: ExtraArgs | None = None


class TokensBody(HandoffParams, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /inference/v1/generate: token ids in, token ids out."""

    token_ids: list[TokenId]
    """Of the prompt."""
    sampling_params: TokenSampling | None = None
    request_id: str | None = None
    """What the id of the response begins with."""
    return_token_ids: bool | None = None
    """The response has prompt_token_ids; in a stream, its first chunk."""
    output_mode: Literal["tokens", "text"] | None = None
    """"text" for the text and logprobs with the texts of tokens, too."""
    reasoning_ended: bool | None = None
    """false, with structured_outputs, is refused: what the text has to match applies from its first token on."""
    stream_options: StreamOptions | None = None
    cache_salt: Salt | None = None
    kv_hints: KvHintsEnvelope | None = None
    priority: Priority | None = None
    slo_ttft_ms: ObjectiveMs | None = None
    deadline_s: DeadlineS | None = None
    data_parallel_rank: Replica | None = None
    model: str | None = None
    stream: bool | None = None

    def __post_init__(self) -> None:
        """kv_transfer_params of the body go before those of extra_args, as in vLLM."""
        extra = self.sampling_params.extra_args if self.sampling_params is not None else None
        if self.kv_transfer_params is None and extra is not None:
            msgspec.structs.force_setattr(self, "kv_transfer_params", extra.kv_transfer_params)


class ScoredBody(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of all bodies that ask for scores. What they are is said at SamplingBody."""

    priority: Priority | None = None
    slo_ttft_ms: ObjectiveMs | None = None
    deadline_s: DeadlineS | None = None
    """Of each item, from when it is submitted."""
    data_parallel_rank: Replica | None = None
    cache_salt: Salt | None = None
    model: str | None = None


class ScoreBody(ScoredBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/score: SGLang's. Texts of query and item are joined before they become tokens."""

    query: str | list[TokenId] | None = None
    """What all items follow; None for nothing."""
    items: str | list[str | list[TokenId]]
    """All texts or all token ids, as the query."""
    label_token_ids: Annotated[list[TokenId | Labels], Meta(min_length=1)]
    """Tokens whose probabilities at the end of each item are the scores, for all items or one list for each."""
    apply_softmax: bool | None = None
    """Probabilities among the labels alone; false for those among all tokens."""
    temperature: ScoreTemperature | None = None
    """Of apply_softmax."""
    return_token_logprobs: bool | None = None
    """The response has the logprobs of the labels, too."""
    item_first: bool | None = None
    """Items come before the query; then they share no prefix."""


class GenerativeScoringBody(ScoredBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /generative_scoring: vLLM's. Query and item become tokens each by itself."""

    query: str | list[TokenId]
    """What all items follow."""
    items: list[str | list[TokenId]]
    label_token_ids: Labels
    """The score is the probability of the first of these tokens at the end of an item."""
    apply_softmax: bool | None = None
    """The probability among the labels alone, as by default; false for that among all tokens."""
    item_first: bool | None = None
    """Items come before the query; then they share no prefix."""
    add_special_tokens: bool | None = None
    """false: a query that is a text begins without BOS."""


class RerankBody(ScoredBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/rerank: vLLM's, Jina's and Cohere's."""

    query: str
    documents: str | list[str]
    top_n: TopN | None = None
    """Documents in the response, the best ones; None and 0 for all."""
    return_documents: bool | None = None
    """false: results have no texts of documents."""
    instruction: str | None = None
    """What makes a document fit a query; None for a web search whose query it answers."""
    instruct: str | None = None
    """SGLang's name of instruction."""
    labels: list[str] | None = None
    """The answers yes and no, each one token of the model; None for "yes" and "no"."""
    label_token_ids: list[TokenId] | None = None
    """Their token ids, in place of labels."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables of the chat template; enable_thinking is false unless it is here."""


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /tokenize: a text or a conversation."""

    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """See ChatBody; so are the next three."""
    reasoning_effort: Effort | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: list[Tool] | None = None
    """Functions that the conversation may call."""
    model: str | None = None


class KvHintsBody(TokenizeBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/kv_hints: a prompt, as a text, token ids or a conversation, and what is to become of its KV."""

    kv_hints: KvHintsEnvelope
    prompt_token_ids: list[TokenId] | None = None
    cache_salt: Salt | None = None
    """As of the requests that the KV is of; so are extra_key and model."""
    extra_key: Salt | None = None


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /detokenize."""

    tokens: list[TokenId]
    model: str | None = None
