import pytest

from headrace.text.tokenizer import Tokenizer
from tests.server.fakes import tiny_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return tiny_tokenizer()
