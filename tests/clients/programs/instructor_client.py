"""instructor: objects of a model by tools and by JSON schemas. Arguments: URL, model."""

import sys
from typing import Literal

import instructor
import openai
from pydantic import BaseModel, ConfigDict

BASE, MODEL = sys.argv[1:]


class City(BaseModel):
    """A city."""

    model_config = ConfigDict(extra="forbid")  # the stub model goes on with further keys until it is cut

    city: Literal["Paris", "Rome"]


for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(openai.OpenAI(base_url=f"{BASE}/v1", api_key="k", max_retries=0), mode=mode)
    messages = [{"role": "user", "content": "Which city?"}]
    found = client.chat.completions.create(
        model=MODEL, messages=messages, response_model=City, max_tokens=2000, max_retries=1
    )
    assert isinstance(found, City)
    print(mode, flush=True)
