"""The items of bodies that ask for scores, as prompts with their labels, checked against the model's limits."""

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from headrace.core.types.errors import invalid, shown
from headrace.server.api.request.prompts import check_ids, encode, encode_chat
from headrace.server.api.request.schema import (
    ChatMessage,
    GenerativeScoringBody,
    RerankBody,
    ScoreBody,
)
from headrace.server.api.scoring.items import ScoredItem
from headrace.server.frontend.served_model import ServedModel
from headrace.server.http.ranges import MAX_ITEMS, MAX_LABELS
from headrace.text.chat_template import TemplateUse

MAX_TOKENS = 1 << 22
"""Of all prompts of a body together; so many take 32 MB."""
ANSWERS = ("yes", "no")
JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note that the "
    'answer can only be "yes" or "no".'
)
"""The system message that rerankers of the Qwen3 family were trained with; so are the other parts of a prompt."""
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"

Text = str | list[int]  # a text, or token ids


class Scored(NamedTuple):
    """What a body asks to be scored."""

    head: Sequence[int]
    """Token ids of what comes before the items."""
    items: list[ScoredItem]


async def score_items_of(model: ServedModel, body: ScoreBody) -> Scored:
    """Items of POST /v1/score. A text is that of query and item together, as in SGLang, so that the tokens where they
    meet may be those of neither. Raises HeadraceError (400)."""
    items: list[Text] = [body.items] if isinstance(body.items, str) else list(body.items)
    _check_count(items, "items")
    if body.temperature not in (None, 1.0) and not body.apply_softmax:
        raise invalid("temperature", "temperature is of apply_softmax: send that as true, or leave temperature out")
    texts = isinstance(items[0], str) if items and body.query is None else isinstance(body.query, str)
    for index, item in enumerate(items):
        if isinstance(item, str) is not texts:
            kinds = ("a text", "token ids") if texts else ("token ids", "a text")
            message = f"items[{index}] is {kinds[1]}, and what is before it is {kinds[0]}; send one kind"
            raise invalid(f"items[{index}]", message, code="invalid_type")
    labels = _labels_of(model, body, len(items))
    query = body.query if body.query is not None else "" if texts else []
    if not texts:
        return await _joined(model, await _part(model, query, "query"), items, labels, bool(body.item_first))

    async def prompt(index: int) -> tuple[int, ...]:
        text = f"{items[index]}{query}" if body.item_first else f"{query}{items[index]}"
        return await encode(model, text, f"items[{index}]")

    head = await model.tokens.encode(str(query), "query") if query and not body.item_first else []
    return await _scored(head, "items", labels, prompt)


async def generative_items_of(model: ServedModel, body: GenerativeScoringBody) -> Scored:
    """Items of POST /generative_scoring. Query and items are tokens each by itself, as in vLLM. Raises HeadraceError
    (400)."""
    _check_count(body.items, "items")
    if not body.items:
        raise invalid("items", "items is empty; send at least one", code="empty_prompt")
    labels = _checked_labels(model, body.label_token_ids, "label_token_ids")
    head = await _part(model, body.query, "query", special=body.add_special_tokens is not False)
    return await _joined(model, head, body.items, [labels] * len(body.items), bool(body.item_first))


async def documents_of(model: ServedModel, body: RerankBody) -> Scored:
    """Documents of POST /v1/rerank, each as a question in the model's chat template. Raises HeadraceError (400)."""
    documents = [body.documents] if isinstance(body.documents, str) else body.documents
    _check_count(documents, "documents")
    if not documents:
        raise invalid("documents", "documents is empty; send at least one", code="empty_prompt")
    for name, text in {"query": body.query, **{f"documents[{at}]": each for at, each in enumerate(documents)}}.items():
        if not text.strip():
            raise invalid(name, f"{name} is empty", code="empty_prompt")
    if body.instruction is not None and body.instruct is not None:
        raise invalid("instruct", "instruct is another name of instruction; send one of them")
    labels = await _answers(model, body)
    instruction = body.instruction or body.instruct or INSTRUCTION
    use = TemplateUse({"enable_thinking": False, **(body.chat_template_kwargs or {})})

    async def asked(document: str, field: str) -> tuple[int, ...]:
        text = f"<Instruct>: {instruction}\n<Query>: {body.query}\n<Document>: {document}"
        messages = [ChatMessage("system", JUDGE), ChatMessage("user", text)]
        ids, _ = await encode_chat(model, messages, field, use=use)
        return ids

    async def prompt(index: int) -> tuple[int, ...]:
        return await asked(documents[index], f"documents[{index}]")

    return await _scored(await asked("", "query"), "documents", [labels] * len(documents), prompt)


async def _answers(model: ServedModel, body: RerankBody) -> tuple[int, ...]:
    """The tokens of the answers yes and no. Raises HeadraceError (400) unless there are two, each one token."""
    if body.label_token_ids is not None:
        if body.labels is not None:
            raise invalid("labels", "labels and label_token_ids are given together; send one of them")
        _check_two(body.label_token_ids, "label_token_ids")
        return _checked_labels(model, body.label_token_ids, "label_token_ids")
    texts = body.labels if body.labels is not None else ANSWERS
    _check_two(texts, "labels")
    ids = []
    for index, text in enumerate(texts):
        found = await model.tokens.encode(text, f"labels[{index}]", special=False)
        if len(found) != 1:
            message = (
                f"labels[{index}] is {shown(text)!r}, which is {len(found)} tokens of this model; it has to be one: "
                "send other labels, or label_token_ids"
            )
            raise invalid(f"labels[{index}]", message)
        ids += found
    return _checked_labels(model, ids, "labels")


def _check_two(labels: Sequence[str | int], field: str) -> None:
    if len(labels) != 2:
        raise invalid(field, f"{field} has {len(labels)} items; it has to have 2: the answers yes and no")


def _check_count(items: Sequence[object], field: str) -> None:
    if len(items) > MAX_ITEMS:
        raise invalid(field, f"{field} has {len(items)} items; at most {MAX_ITEMS} fit in one request")


def _labels_of(model: ServedModel, body: ScoreBody, count: int) -> list[tuple[int, ...]]:
    """The labels of each of so many items."""
    given = body.label_token_ids
    lists = [ids for ids in given if isinstance(ids, list)]
    if not lists:
        return [_checked_labels(model, [ids for ids in given if isinstance(ids, int)], "label_token_ids")] * count
    if len(lists) < len(given):
        message = "label_token_ids mixes token ids and lists; send one kind"
        raise invalid("label_token_ids", message, code="invalid_type")
    if len(lists) != count:
        message = f"label_token_ids has {len(lists)} lists for {count} items; send one for each, or one for all"
        raise invalid("label_token_ids", message)
    return [_checked_labels(model, ids, f"label_token_ids[{index}]") for index, ids in enumerate(lists)]


def _checked_labels(model: ServedModel, ids: Sequence[int], field: str) -> tuple[int, ...]:
    if len(ids) > MAX_LABELS:
        raise invalid(field, f"{field} has {len(ids)} items; at most {MAX_LABELS} are allowed")
    check_ids(ids, field, model.vocab_size)
    if len(set(ids)) < len(ids):
        raise invalid(field, f"{field} has a token more than once")
    return tuple(ids)


async def _part(model: ServedModel, text: Text, field: str, *, special: bool = True) -> tuple[int, ...]:
    """Token ids of a part of a prompt, which may be empty."""
    if isinstance(text, str):
        return tuple(await model.tokens.encode(text, field, special=special)) if text else ()
    check_ids(text, field, model.vocab_size)
    return tuple(text)


async def _joined(
    model: ServedModel,
    query: tuple[int, ...],
    items: Sequence[Text],
    labels: Sequence[tuple[int, ...]],
    item_first: bool,
) -> Scored:
    """Query and items that became tokens each by itself."""

    async def prompt(index: int) -> tuple[int, ...]:
        field = f"items[{index}]"
        own = await _part(model, items[index], field, special=False)
        return await encode(model, [*own, *query] if item_first else [*query, *own], field)

    return await _scored(() if item_first else query, "items", labels, prompt)


async def _scored(
    head: Sequence[int],
    field: str,
    labels: Sequence[tuple[int, ...]],
    prompt: Callable[[int], Awaitable[tuple[int, ...]]],
) -> Scored:
    """Raises HeadraceError (400) for prompts that are too long together."""
    items, total = [], 0
    for index, own in enumerate(labels):
        place = f"{field}[{index}]"
        ids = await prompt(index)
        total += len(ids)
        if total > MAX_TOKENS:
            message = f"the prompts up to {place} have {total} tokens; at most {MAX_TOKENS} fit in one request"
            raise invalid(place, message)
        items.append(ScoredItem(place, ids, own))
    return Scored(head, items)
