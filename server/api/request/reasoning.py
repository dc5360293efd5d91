"""Reasoning in the answers of chats: where it begins, who gets it, and constraints that apply after it."""

from typing import NamedTuple

from headrace.core.types.errors import invalid
from headrace.core.types.requests.constraint import Constraint
from headrace.server.api.request.schema import ChatBody, ChatMessage, ResponsesBody
from headrace.server.api.request.tools import ToolUse
from headrace.server.frontend.served_model import ServedModel
from headrace.text.answers.answer_grammar import after_reasoning
from headrace.text.answers.answer_parser import AnswerParser
from headrace.text.answers.reasoning import Opening, ReasoningForm, opening_of
from headrace.text.tool_calls.marks import MARKS

LAST_TOKENS = 16  # of a prompt, which tell where an answer begins: marks are a token or a few


class AnswerUse(NamedTuple):
    """How the answers of a chat are read."""

    tools: ToolUse | None
    """What they may call."""
    reasoning: ReasoningForm | None
    """How they mark their reasoning; None if it is not to be told from content."""
    opening: Opening = "unsaid"
    included: bool = True
    """Whether the client gets the reasoning."""

    @property
    def parsed(self) -> bool:
        """Whether there is anything to be told from content."""
        return self.tools is not None or self.reasoning is not None

    def parser(self) -> AnswerParser:
        """A parser of one answer."""
        tools = self.tools
        if tools is None:
            return AnswerParser(None, {}, self.reasoning, self.opening)
        functions = {name: function.parameters or {} for name, function in tools.functions.items()}
        return AnswerParser(tools.form, functions, self.reasoning, self.opening, parallel=tools.parallel)

    def shown(self, model: ServedModel) -> frozenset[int]:
        """Tokens that the parser has to see: they are in the text, special ones, too."""
        marks = (*(MARKS if self.tools else ()), *(self.reasoning.marks if self.reasoning else ()))
        ids = [model.tokenizer.added_id(mark) for mark in marks]
        return frozenset(token for token in ids if token is not None)


async def answer_use(
    model: ServedModel,
    client: str,
    body: ChatBody | ResponsesBody,
    prompt: tuple[int, ...],
    tools: ToolUse | None,
    constraint: Constraint | None,
) -> tuple[AnswerUse, Constraint | None]:
    """How the answers to a prompt are read, and what they have to match: a constraint applies to what follows the
    reasoning. One that cannot be put there applies to all of the text, which has no reasoning then. Raises
    HeadraceError (400) for one that gets too large."""
    form = model.reasoning_form
    if form is None:
        return AnswerUse(tools, None), constraint
    end = model.tokenizer.decode(prompt[-LAST_TOKENS:], skip_special=False)
    opening = opening_of(form, end, _continued(body))
    included = separate = True
    if isinstance(body, ChatBody):
        included, separate = body.include_reasoning is not False, body.separate_reasoning is not False
    if constraint is not None:
        grammar = after_reasoning(constraint, form, opening, model.tokenizer.added_id, framed=tools is not None)
        if grammar is None:
            return AnswerUse(tools, None), constraint
        if grammar != constraint and (problem := await model.grammars.problem(grammar, client=client)):
            text = f"what this text has to match cannot be used after its reasoning: {problem}"
            raise invalid("structured_outputs", text, code="invalid_constraint")
        constraint = grammar
    return AnswerUse(tools, form if separate else None, opening, included), constraint


def _continued(body: ChatBody | ResponsesBody) -> str | None:
    """The text of the message that the answer continues, if it does."""
    if not isinstance(body, ChatBody) or not body.continue_final_message or not body.messages:
        return None
    content = body.messages[-1].content
    return "".join(part.text or "" for part in content) if isinstance(content, list) else content or ""


def reasoning_of(message: ChatMessage) -> dict[str, str]:
    """The reasoning of an earlier answer, by the names that chat templates have for it."""
    text = message.reasoning_content or message.reasoning
    if not text or message.role != "assistant":
        return {}
    # gpt-oss' template takes only one of the two for a message with calls.
    thinking = {} if message.content and message.tool_calls else {"thinking": text}
    return {"reasoning_content": text, "reasoning": text, **thinking}
