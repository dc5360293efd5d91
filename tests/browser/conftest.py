"""Fixtures of the tests in a browser."""

from collections.abc import Iterator

import pytest

from tests.browser.chromium import Tab, chromium, executable


@pytest.fixture
def tab() -> Iterator[Tab]:
    program = executable()
    assert program is not None, "no Chromium is installed; on Debian: apt-get install chromium"
    with chromium(program) as opened:
        yield opened
