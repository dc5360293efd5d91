"""All requests of the scheduler, found by serial, arrival number and rid."""

from collections.abc import Iterator

from headrace.scheduler.requests.record import Request


class RequestTable:
    """Every request from its admission until its pages are free.

    Stages know a request by its serial, deadlines and queues by its arrival number, the front end by its rid. The rid
    is free for a new request as soon as the old one has ended.
    """

    def __init__(self) -> None:
        self._by_serial: dict[int, Request] = {}
        self._by_arrival: dict[int, Request] = {}
        self._by_rid: dict[str, Request] = {}
        self._left: dict[str, Request] = {}  # those with leftovers, by rid
        self._serials = 0
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._by_serial)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._by_serial.values())

    @property
    def in_order(self) -> Iterator[Request]:
        """All requests in the order of their arrival."""
        return iter(self._by_arrival.values())

    def new_arrival(self) -> int:
        """The arrival number of the next request."""
        self._arrivals += 1
        return self._arrivals

    def new_serial(self) -> int:
        """A serial that no request has had."""
        self._serials += 1
        return self._serials

    def add(self, request: Request) -> None:
        """Take in a request that was admitted."""
        self._by_serial[request.serial] = self._by_arrival[request.arrival] = request
        self._by_rid[request.rid] = request

    def by_serial(self, serial: int) -> Request | None:
        """The request that stages know by this number."""
        return self._by_serial.get(serial)

    def by_arrival(self, arrival: int) -> Request | None:
        """The request with this arrival number."""
        return self._by_arrival.get(arrival)

    def live(self, rid: str) -> Request | None:
        """The request with this rid that has not ended."""
        return self._by_rid.get(rid)

    def end(self, request: Request) -> None:
        """Free the rid of a request that has ended."""
        del self._by_rid[request.rid]

    def leave(self, request: Request) -> None:
        """Take in a request that has failed, and whose pages are kept for the next attempt under its rid."""
        self._left[request.rid] = request

    def take(self, request: Request) -> None:
        """Its pages are not kept any longer."""
        if self._left.get(request.rid) is request:
            del self._left[request.rid]

    def left(self, rid: str) -> Request | None:
        """The failed request with this rid whose pages are kept."""
        return self._left.get(rid)

    def before(self, request: Request) -> Request | None:
        """The attempt whose pages a request may go on from: a failed one, or one that is late."""
        left = self._left.get(request.follows) if self._left else None
        return self._by_rid.get(request.submit.follows) if left is None and request.submit.follows else left

    def following(self, request: Request) -> Request | None:
        """The live attempt that may go on from the pages of a failed one."""
        live = self._by_rid.get(request.rid)
        return live or next((one for one in self._by_rid.values() if one.follows == request.rid), None)

    def renumber(self, request: Request) -> None:
        """Give a request a new serial: what stages still report under the old one does not match it."""
        del self._by_serial[request.serial]
        request.serial = self.new_serial()
        request.on_stages.renumbered()
        self._by_serial[request.serial] = request

    def remove(self, request: Request) -> None:
        """Forget a request that holds nothing any more."""
        del self._by_serial[request.serial]
        del self._by_arrival[request.arrival]

    def check(self) -> Iterator[str]:
        """Discrepancies between the three indices."""
        if len(self._by_arrival) != len(self._by_serial):
            yield f"{len(self._by_serial)} requests by serial, {len(self._by_arrival)} by arrival number"
        for serial, request in self._by_serial.items():
            if request.serial != serial or self._by_arrival.get(request.arrival) is not request:
                yield f"{request.rid} is not found by its arrival number, or has another serial"
            if (self._by_rid.get(request.rid) is request) == request.ended:
                yield f"{request.rid} is {'still' if request.ended else 'not'} found by its id"
        for rid, request in self._left.items():
            if request.rid != rid or request.leftover is None or self._by_serial.get(request.serial) is not request:
                yield f"{rid} is listed with pages that are kept, and has none"
        live = sum(not request.ended for request in self._by_serial.values())
        if live != len(self._by_rid):
            yield f"{len(self._by_rid)} requests by id, {live} of them live"
