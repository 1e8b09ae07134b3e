"""Turns of several engines: dispatch requests, deliver the engines' messages, and handle the end of a process."""

import bisect
import math
import os
import threading
import time
from typing import Any

from xla_engine.data_parallel.adapters import FleetAdapters, Key
from xla_engine.data_parallel.fleet import Fleet, Member
from xla_engine.data_parallel.request import RemoteRequest
from xla_engine.data_parallel.routing import PrefixRouter
from xla_engine.data_parallel.wire import Message
from xla_engine.engine.locked import locked
from xla_engine.engine.requests.validation import check_takes
from xla_engine.engine.turn import Turn, Wait, drive
from xla_engine.errors import ConfigError, EngineClosedError, InvalidRequestError, ReplayError
from xla_engine.scheduler import FinishReason

DEATHS_SURVIVED = 2  # a request that was running when this many processes ended then runs alone
LOOK_AHEAD = 256  # how many requests may overtake one that waits for room for its adapter
IDLE_WAIT_S = 1.0  # timeout of a wait for messages, which then begins again


class FleetLoop:
    """The counterpart of `Loop` and `Driver` for several engines.

    lock: guards the state of requests, and is notified at the end of each turn. Methods that do not take it need
        their caller to hold it.
    live: the live requests. finished: number of sequences by finish reason.
    recoveries: number of processes that ended. closed: why the engine is closed; None while it is open.
    draining: no new requests are accepted; live ones continue.
    """

    def __init__(self, fleet: Fleet, adapter_key: Key) -> None:
        """adapter_key: see `key_reader`."""
        self.lock = threading.Condition()
        self.clock = time.monotonic
        self.fleet = fleet
        self.router = PrefixRouter(fleet.config.block_size, slack=fleet.config.num_slots)
        self.live: dict[str, RemoteRequest] = {}
        self.adapters = FleetAdapters(
            adapter_key, fleet.config.max_loras, fleet.members, lambda: self.live.values()
        )
        self._line: list[RemoteRequest] = []  # the queue of requests without an engine
        self._runs = 0
        self.finished = {str(reason): 0 for reason in FinishReason}
        self.recoveries = 0
        self._turning, self._driver, self._turns = False, 0, 0
        # an interrupt came in the middle of a turn, so messages may have been lost
        self._unsettled = False
        self.closed: str | None = None
        self.draining = False
        self._pid = os.getpid()

    def check_open(self) -> None:
        """Raise EngineClosedError if the engine accepts no requests."""
        if os.getpid() != self._pid:
            raise EngineClosedError(f"the engine belongs to process {self._pid}; make one in this process")
        check_takes(self.closed, draining=self.draining)

    def add(self, request: RemoteRequest) -> None:
        self.live[request.request_id] = request
        self._put_in_line(request)
        self._dispatch()

    def _put_in_line(self, request: RemoteRequest) -> None:
        request.engine = None
        bisect.insort(self._line, request, key=lambda each: each.place)

    def _dispatch(self) -> None:
        """Send queued requests to engines that can take them."""
        ready = [member for member in self.fleet.members if member.ready]
        suspect = next((each for each in self._line if each.deaths >= DEATHS_SURVIVED), None)
        if suspect is not None and ready:
            chosen = min(ready, key=lambda member: len(member.live))
            if not chosen.live:
                self._line.remove(suspect)
                suspect.alone = True
                self._begin(suspect, chosen)
            ready.remove(chosen)  # no other request goes there first
        ready = [member for member in ready if not any(each.alone for each in member.live.values())]
        place, slots = 0, self.fleet.config.num_slots
        # requests since the first one that waits for room for its adapter; none of them may take that room
        waiting = 0
        while place < len(self._line) and waiting <= LOOK_AHEAD:
            request = self._line[place]
            loads = {
                member.index: len(member.live)
                for member in ready
                if len(member.live) < 2 * slots or request.priority < 0
            }
            if not loads:
                return
            if request.deaths >= DEATHS_SURVIVED:
                place += 1
                continue
            having: set[int] = set()
            if request.adapter is not None:
                near, having = self.adapters.engines_for(request.adapter, loads, slack=slots)
                loads = {} if waiting else near
            if waiting or not loads:
                waiting += 1
            if not loads:
                place += 1
                continue
            del self._line[place]
            index = self.router.choose(request.token_ids, request.shares, loads, having)
            self._begin(request, self.fleet.members[index])

    def _begin(self, request: RemoteRequest, member: Member) -> None:
        assert member.process is not None
        if request.adapter is not None:
            self.adapters.make_room(member, request.adapter)
        self._runs += 1
        member.live[self._runs] = request
        member.process.tell(request.command(self._runs, member.index, self.clock()))

    def advance(self) -> None:
        """Run one turn. Raises EngineClosedError."""
        drive(self.turn())

    def turn(self) -> Turn:
        """Dispatch requests, wait for messages, and deliver them. Raises EngineClosedError.

        If another thread runs a turn, wait for its end instead.

        An interrupt in the middle is raised again, and every request then runs again.
        """
        with self.lock:
            ended = self._turns
            if self._turning and self._driver != threading.get_ident():
                self.lock.wait_for(lambda: self._turns != ended)
                return
            if self.closed is not None:
                raise EngineClosedError(f"the engine is closed ({self.closed}); make a new one")
            self.settle()
            self.expire()
            self._dispatch()
            if not self.live:
                return
            self._turning, self._driver = True, threading.get_ident()
        try:
            answer = yield Wait(self._wait, lambda: math.inf, self.expire)
        except BaseException as error:
            answer = error
        self._hear_all(answer)

    def _wait(self) -> list[tuple[int, Message | None]]:
        with self.lock:
            until = min((each.expires for each in self._line), default=math.inf)
            left = max(until - self.clock(), 1e-3)
        return self.fleet.wait(min(left, IDLE_WAIT_S))

    @locked
    def _hear_all(self, answer: Any) -> None:
        """Deliver messages. If the answer is an exception, such as an interrupt, raise it; the next turn recovers."""
        self._unsettled = True
        try:
            if isinstance(answer, BaseException):
                raise answer
            for index, message in answer:
                self._hear(self.fleet.members[index], message)
            self._dispatch()
            self._unsettled = False
        finally:
            self._turning = False
            self._turns += 1
            self.lock.notify_all()

    def listen(self) -> None:
        """Handle pending messages, unless a turn is in progress."""
        if not self._turning and self.closed is None:
            self._hear_all(self.fleet.wait(0))

    def _hear(self, member: Member, message: Message | None) -> None:
        if message is None:
            self._after_end(member, self.fleet.ended(member))
            return
        if message["op"] == "news":
            member.running = message["running"]
            for news in message["news"]:
                self._take(member, news)
        elif message["op"] == "stats":
            member.stats, member.running = message["stats"], message["running"]
        elif message["op"] == "snapshot":
            member.snapshot = message["snapshot"]
        elif message["op"] == "ready":
            try:
                self.fleet.take_ready(member, message)
            except ConfigError as error:
                self.fail(str(error))
            self.adapters.load_again(member)
        elif message["op"] == "refused":
            request = member.live.get(message["number"])
            if request is not None:
                self._refuse(request, message["message"])

    def _refuse(self, request: RemoteRequest, why: str) -> None:
        """Handle an engine's rejection of a request that was valid here."""
        if request.on_refused is None:
            self._end(request, "error", why)
        else:
            self._forget(request)
            request.on_refused(InvalidRequestError(why))

    def _take(self, member: Member, news: Message) -> None:
        request = member.live.get(news["number"])
        if request is None:
            return  # aborted meanwhile
        try:
            is_news = request.take(news)
        except ReplayError as error:
            self._end(request, "error", str(error))
            return
        if is_news and (request.finished or request.collector.every_token):
            request.collector.put(request)
        if request.finished:
            member.deaths = 0
            self._forget(request)

    def settle(self) -> None:
        """After an interrupt in the middle of a turn, run every request again, invisibly to its reader."""
        if not self._unsettled:
            return
        self._line = []
        for member in self.fleet.members:
            for number in member.live:
                member.tell({"op": "abort", "number": number})
            member.live.clear()
        for request in list(self.live.values()):
            if request.finished:
                del self.live[request.request_id]
            else:
                request.alone = False
                self._put_in_line(request)
        self._unsettled = False

    def _after_end(self, member: Member, why: str) -> None:
        """Run the requests of an ended process again elsewhere, except one that ran alone in it."""
        self.recoveries += 1
        self.router.forget(member.index)
        live, member.live = list(member.live.values()), {}
        for request in live:
            request.deaths += 1
            request.engine = None
            if request.alone:
                cause = (
                    f"{request.deaths} engines ended with this request, the last one with no other: it {why}"
                )
                self._end(request, "error", cause)
            else:
                self._put_in_line(request)
        if member.process is None:
            member.adapters.clear()
        if all(each.process is None for each in self.fleet.members):
            self.fail(f"every engine has ended too often; the last one {why}")

    def _forget(self, request: RemoteRequest) -> None:
        del self.live[request.request_id]
        if request.engine is None:
            self._line.remove(request)
        else:
            self.fleet.members[request.engine].live.pop(request.number, None)
        for sequence in request.shown.sequences.values():
            if sequence.finish is not None:  # else an engine rejected its rerun
                self.finished[sequence.finish] += 1

    def _end(self, request: RemoteRequest, reason: str, error: str | None) -> None:
        if request.engine is not None:
            self.fleet.members[request.engine].tell({"op": "abort", "number": request.number})
        request.end(reason, error, self.clock())
        if request.engine is None and request not in self._line:
            self._put_in_line(request)
        request.collector.put(request)
        self._forget(request)

    @locked
    def abort(self, request_id: str, cause: str | None = None) -> bool:
        """As `XlaBatchEngine.abort`."""
        request = self.live.get(request_id)
        if request is None:
            return False
        self._end(request, "abort", cause)
        return True

    @locked
    def abort_all(self, cause: str | None = None) -> None:
        """End every live request now."""
        for request_id in list(self.live):
            self.abort(request_id, cause)

    @locked
    def expire(self) -> None:
        """End expired requests in the queue; engines check those that they run."""
        now = self.clock()
        for request in [each for each in self._line if each.expires <= now]:
            self._end(request, "deadline" if request.deadline <= now else "queue_timeout", None)

    @locked
    def fail(self, cause: str) -> None:
        """Close because of a failure: every request ends with reason "error", and later submits fail at once."""
        self.closed = cause
        for request in list(self.live.values()):
            self._end(request, "error", cause)

    def close(self) -> None:
        """Abort live requests and end the processes. Does nothing in a forked child."""
        with self.lock:
            if os.getpid() != self._pid:
                return
            if self.closed is None:
                self.abort_all()
                self.closed = "close() was called"
        self.fleet.close()
