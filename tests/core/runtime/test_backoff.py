"""Back-off between attempts."""

from headrace.core.runtime.rate_limit import Backoff


def test_delays_grow_by_the_factor_up_to_the_last_one() -> None:
    backoff = Backoff(0.5, 5.0, factor=3.0)
    assert [backoff.next_delay() for _ in range(5)] == [0.5, 1.5, 4.5, 5.0, 5.0]


def test_a_success_begins_anew() -> None:
    backoff = Backoff(1.0, 8.0)
    assert [backoff.next(10.0), backoff.next(11.0)] == [11.0, 13.0]
    backoff.reset()
    assert backoff.next(20.0) == 21.0
