"""Ranges of the values of fields, as types: decoding refuses others (api/request/explain.py says it in words), and
GET /openapi.json shows them. What depends on the model or on other fields is checked where it is used."""

from typing import Annotated

from msgspec import Meta

from headrace.core.types.requests.adapters import MAX_SALT_CHARS
from headrace.core.types.requests.draft import MAX_DRAFT_TOKENS

MAX_LOGPROBS = 20  # alternatives per position that a metadata row can carry
MAX_CHOICES = 16
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_IDS = 4096
MAX_BIASES = 1024
MAX_OBJECTIVE_MS = 1e9
MAX_LABELS = 64
MAX_ITEMS = 1024
MAX_INT32 = (1 << 31) - 1
MAX_INT64 = (1 << 63) - 1

# Longer numbers would be read in a time that grows with the square of their length.
TokenId = Annotated[int, Meta(ge=-MAX_INT64 - 1, le=MAX_INT64)]
Seed = TokenId
Temperature = Annotated[float, Meta(ge=0, le=2)]
Labels = Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_LABELS)]
ScoreTemperature = Annotated[float, Meta(gt=0, le=1e6)]
TopK = Annotated[int, Meta(ge=-1, le=MAX_INT64)]
TopN = Annotated[int, Meta(ge=0, le=MAX_INT64)]
TopP = Annotated[float, Meta(ge=0, le=1)]
MinP = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Repetition = Annotated[float, Meta(ge=0.01, le=100)]  # far beyond these, logits would overflow
Bias = Annotated[float, Meta(ge=-100, le=100)]
Biases = Annotated[dict[str, Bias], Meta(max_length=MAX_BIASES)]
MaxTokens = Annotated[int, Meta(ge=1, le=MAX_INT64)]
MaxTokensOrNone = Annotated[int, Meta(ge=0, le=MAX_INT64)]
MinTokens = Annotated[int, Meta(ge=0, le=MAX_INT64)]
Alternatives = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
Position = Annotated[int, Meta(ge=0, le=MAX_INT32)]
PositionOrNone = Annotated[int, Meta(ge=-1, le=MAX_INT32)]  # -1: none
DraftTopK = Annotated[int, Meta(ge=0, le=MAX_DRAFT_TOKENS)]
Choices = Annotated[int, Meta(ge=1, le=MAX_CHOICES)]
StopText = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
Stop = Annotated[str, Meta(max_length=MAX_STOP_CHARS)] | Annotated[list[StopText], Meta(max_length=MAX_STOPS)]
StopIds = Annotated[list[TokenId], Meta(max_length=MAX_STOP_IDS)]
Priority = Annotated[int, Meta(ge=-MAX_INT32 - 1, le=MAX_INT32)]
ObjectiveMs = Annotated[float, Meta(gt=0, le=MAX_OBJECTIVE_MS)]
DeadlineS = Annotated[float, Meta(gt=0)]
Replica = Annotated[int, Meta(ge=0, le=MAX_INT32)]
Salt = Annotated[str, Meta(max_length=MAX_SALT_CHARS)]
Retention = Annotated[str, Meta(max_length=32)]
Effort = Annotated[str, Meta(min_length=1, max_length=32)]
