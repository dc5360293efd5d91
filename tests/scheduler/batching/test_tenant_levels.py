"""Tenants by the names of keys and, without a name, by cache salts that clients choose."""

from itertools import count

from headrace.core.messages.frontend import Submit
from headrace.core.types.requests.request import Discard, SamplingParams
from headrace.core.types.requests.terms import RequestTerms
from headrace.scheduler.policies.tenants import TenantLevels
from headrace.scheduler.requests.phase import Phase
from headrace.scheduler.requests.record import Request

LAG_S = 1.0


class Queue:
    """Requests that are queued, and what they have been served."""

    def __init__(self) -> None:
        self.levels = TenantLevels(LAG_S)
        self._numbers = count()

    def put(self, name: str = "", salt: str = "", seconds: float = 0.0) -> Request:
        number = next(self._numbers)
        terms = RequestTerms(tenant=name, cache_salt=salt)
        submit = Submit(rid=str(number), prompt=b"", sampling=SamplingParams(), route=Discard(), terms=terms)
        request = Request(submit, number, number, 0.0, 1, Phase.WAITING)
        self.levels.join(request)
        self.levels.charge(request, seconds)
        return request


def test_salts_are_tenants_of_each_other() -> None:
    queue = Queue()
    little, much = queue.put(salt="a"), queue.put(salt="b", seconds=1.5 * LAG_S)
    assert queue.levels.ahead(little) == (0, "")
    assert queue.levels.ahead(much) == (1, "salt b")


def test_a_salt_for_each_request_makes_one_tenant_beside_a_key() -> None:
    queue = Queue()
    named = queue.put(name="alice", seconds=0.1)
    flood = [queue.put(salt=str(number), seconds=0.5) for number in range(4)]
    assert queue.levels.ahead(named) == (0, "")
    assert {queue.levels.ahead(request) for request in flood} == {(2, "key ")}


def test_the_name_of_a_key_as_salt_is_not_that_key() -> None:
    queue = Queue()
    named, false = queue.put(name="alice"), queue.put(salt="alice", seconds=5.0)
    assert queue.levels.ahead(named) == (0, "")
    assert queue.levels.ahead(false) == (2, "key ")
    assert not set(queue.levels.groups(named)) & set(queue.levels.groups(false))


def test_a_new_salt_does_not_come_before_one_that_has_been_served() -> None:
    queue = Queue()
    served = queue.put(salt="old", seconds=5.0)
    queue.put(salt="new")
    assert queue.levels.ahead(served) == (0, "")


def test_a_key_that_returns_comes_before_one_that_has_been_served_all_the_time() -> None:
    queue = Queue()
    served = queue.put(name="greedy", seconds=5.0)
    queue.put(name="honest")
    assert queue.levels.ahead(served) == (2, "key greedy")
