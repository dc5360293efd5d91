"""The model as clients see it: its names, its limits and its tokenizer."""

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING

from jinja2 import TemplateError

from headrace.core.config import Config
from headrace.core.types import refusals
from headrace.core.types.errors import ConfigError, invalid
from headrace.core.types.requests.adapters import adapter_folders
from headrace.core.types.requests.images import ImageTerms
from headrace.engine.grammar.checker import CheckerConfig
from headrace.server.frontend.grammar_checker import GrammarChecker
from headrace.server.frontend.request.hidden_states import HiddenLimits
from headrace.server.frontend.request.image_memory import ImageMemory
from headrace.text.answers.reasoning import ReasoningForm, reasoning_form
from headrace.text.async_tokenizer import AsyncTokenizer
from headrace.text.tokenizer import Tokenizer, load_tokenizer
from headrace.text.tool_calls.call_form import CallForm, call_form

if TYPE_CHECKING:
    from headrace.server.frontend.image_reader import ImageReader

log = logging.getLogger(__name__)


class ServedModel:
    """Names, limits and tokenizer of the one model that a server serves.

    config is resolved: max_model_len and vocab_size are known. tokenizer: loaded by load() if not given.
    """

    def __init__(self, config: Config, tokenizer: Tokenizer | None = None) -> None:
        self._cache_dir = config.server.cache_dir
        self._template_file = config.server.chat_template
        self._tool_parser = config.server.tool_parser
        self._reasoning_parser = config.server.reasoning_parser
        self._vocab_size = config.scheduler.vocab_size
        self._server = config.server
        self._images = config.model.images
        self._no_images = config.model.no_images
        self._image_reader: ImageReader | None = None
        self.image_memory = ImageMemory()
        self._tokenizer = tokenizer
        self._async_tokenizer: AsyncTokenizer | None = None
        self._grammars: GrammarChecker | None = None
        self.path: str = config.model.model
        """What --model names: a folder, a file or a hub id."""
        self.name: str = config.model_name
        """What responses call the model."""
        self.adapters: Mapping[str, str] = adapter_folders(config.model.lora)
        """Folders of its LoRA adapters, by the names that requests may give."""
        self.max_model_len: int = config.scheduler.max_model_len
        """Longest prompt and continuation together, in tokens; 0 if there is no limit."""
        self.hidden = HiddenLimits(config.model.hidden_size, config.server.max_hidden_bytes)
        """Hidden states that requests may ask for."""

    async def load(self) -> None:
        """Load the tokenizer. Raises ConfigError for a model without one that can be used."""
        if self._tokenizer is None:
            self._tokenizer = await asyncio.to_thread(_warm_tokenizer, self.path, self._cache_dir, self._template_file)
        if self._images is not None and self._server.max_images:
            await asyncio.to_thread(self._load_images, self._images, self._tokenizer)
        self._async_tokenizer = AsyncTokenizer(self._tokenizer, self.max_model_len)
        self._grammars = GrammarChecker(CheckerConfig(self.path, self._cache_dir, self.vocab_size))

    async def close(self) -> None:
        """Stop the tokenizer's threads, and the process that checks constraints."""
        if self._grammars is not None:
            await self._grammars.close()
        if self._async_tokenizer is not None:
            self._async_tokenizer.close()
        if self._image_reader is not None:
            await self._image_reader.close()

    def _load_images(self, terms: ImageTerms, tokenizer: Tokenizer) -> None:
        from headrace.server.frontend.image_reader import ImageReader  # imports pillow

        try:
            self._image_reader = ImageReader(self.path, terms, tokenizer, self._server, self.image_memory)
        except ConfigError as error:
            self._no_images = str(error)
            log.warning("images are refused: %s", error)

    @property
    def takes_images(self) -> bool:
        """Whether requests may have images, as far as is known: while it is loading, its processor was not tried."""
        return self._images is not None and self._server.max_images > 0 and not self._no_images

    def images(self, field: str) -> "ImageReader":
        """Reads images. field: where a body has one. Raises HeadraceError (400) for a model that takes none."""
        if self._image_reader is None:
            reason = self._no_images or "--max-images is 0"
            raise invalid(field, f"{field} is an image, and images are not taken: {reason}", code="unsupported")
        return self._image_reader

    @property
    def loaded(self) -> bool:
        """Whether the tokenizer can be used."""
        return self._async_tokenizer is not None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the model that requests may give."""
        return tuple(dict.fromkeys((self.name, self.path)))

    def called(self, name: str) -> str:
        """What responses call the model of a request that names it so: an adapter by its name."""
        return name if name in self.adapters else self.name

    @property
    def tokens(self) -> AsyncTokenizer:
        """The tokenizer's slow calls. Raises HeadraceError (503) while it is being loaded."""
        if self._async_tokenizer is None:
            raise refusals.LOADING.raised()
        return self._async_tokenizer

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer's fast calls. Raises HeadraceError (503) while it is being loaded."""
        return self.tokens.tokenizer

    @property
    def grammars(self) -> GrammarChecker:
        """Checks constraints. Raises HeadraceError (503) while the tokenizer is being loaded."""
        if self._grammars is None:
            raise refusals.LOADING.raised()
        return self._grammars

    @property
    def takes_tools(self) -> bool:
        """Whether its chat template tells it of tools. Raises HeadraceError (503) while the server is loading."""
        template = self.tokenizer.tool_template
        with suppress(TemplateError):  # what is wrong with it, rendering says
            return template is not None and template.takes_tools
        return True

    @cached_property
    def call_form(self) -> CallForm | None:
        """How it writes tool calls; None if that is not known. Raises HeadraceError (503) while the tokenizer is being
        loaded."""
        return call_form(self._tool_parser, self._template_source)

    @cached_property
    def reasoning_form(self) -> ReasoningForm | None:
        """How it marks its reasoning; None if it is not known to reason. Raises HeadraceError (503) while the tokenizer
        is being loaded."""
        return reasoning_form(self._reasoning_parser, self._template_source, self.tokenizer.added_id)

    @property
    def _template_source(self) -> str:
        template = self.tokenizer.tool_template
        return template.source if template is not None else ""

    @property
    def vocab_size(self) -> int:
        """Token ids are below this. Raises HeadraceError (503) if only the tokenizer knows and it is being loaded."""
        return self._vocab_size or self.tokenizer.vocab_size


def _warm_tokenizer(model: str, cache_dir: str, template_file: str) -> Tokenizer:
    tokenizer = load_tokenizer(model, cache_dir, template_file)
    tokenizer.warm_up()
    return tokenizer
