"""What a worker of a cluster knows without being told."""

import hashlib

import pytest

from headrace.core.config import STAGE_KEY_VARIABLE
from headrace.server.cluster.rank_process import RankProcess


def test_a_key_in_the_environment_of_a_worker_need_not_be_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    digest = hashlib.sha256(b"a key").hexdigest()
    monkeypatch.delenv(STAGE_KEY_VARIABLE, raising=False)
    assert not RankProcess().knows_key(digest)
    monkeypatch.setenv(STAGE_KEY_VARIABLE, "another key")
    assert not RankProcess().knows_key(digest)
    monkeypatch.setenv(STAGE_KEY_VARIABLE, "a key")
    assert RankProcess().knows_key(digest)
