"""Runs the agent's main loop: accepts engines, starts a worker for each rank, and passes messages to and from HTTP.

Owns the engine socket and HTTP's snapshots; moves no bytes and knows no rooms. The death of a worker is reported to
its siblings. Its engine reconnects by itself and gets a new worker at the old address.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import selectors
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from longshore_agent.control.engine_link import EngineListener, PeerProcess, process_of
from longshore_agent.control.node_link import (
    AdoptEngine,
    Drain,
    EndpointKnown,
    EngineAdopted,
    EngineLeft,
    Failed,
    FromWorker,
    NodeMessage,
    NotStarted,
    PoolMessage,
    Retiring,
    RoomFailed,
    RoomReported,
    SiblingLost,
    SnapshotPart,
    SnapshotWanted,
    Started,
)
from longshore_agent.settings import Settings
from longshore_agent.status import findings, node_facts
from longshore_agent.status.metrics import Metrics
from longshore_agent.status.snapshot import AgentSnapshot
from longshore_agent.supervisor import slots
from longshore_agent.supervisor.callers import Callers
from longshore_agent.supervisor.failed_rooms import FailedRooms
from longshore_agent.supervisor.lives import Lives
from longshore_agent.supervisor.pool_broker import PoolBroker
from longshore_agent.supervisor.reception import Reception
from longshore_agent.supervisor.restarts import Restarts
from longshore_agent.supervisor.slots import Slot
from longshore_agent.supervisor.snapshots import Call, LeftWorkers, Snapshots
from longshore_agent.supervisor.telemetry import Telemetry
from longshore_spec.agent_config import AgentConfig, digests
from longshore_spec.status import InstanceStatus, SelfTest, WorkerState
from longshore_wire.addresses import main_address
from longshore_wire.effects import PeerId, Replica
from longshore_wire.engine_messages import Endpoint, Hello
from longshore_wire.errors import LongshoreError, Reason
from longshore_wire.names import ON_GPU, SOCKET_FILE, UNKNOWN_WIRE

_log = logging.getLogger(__name__)

# The loop turns at least this often, so that its age shows its liveness.
_TURN_S = 1.0


class Supervisor:
    """The agent's main loop. `run` serves until a signal handler or another thread calls `stop`."""

    def __init__(self, settings: Settings, config: AgentConfig | None = None) -> None:
        self.settings = settings
        self.metrics = Metrics()
        self.snapshots = Snapshots(self._wake_up)
        self._left = LeftWorkers()
        self._reception = Reception(settings, config)
        self._telemetry = Telemetry(settings, self.metrics, self._reception.version)
        self._config_digests = {} if config is None else digests(config)
        self._selector = selectors.DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        directory = Path(settings.run_directory)
        directory.mkdir(mode=0o750, parents=True, exist_ok=True)
        self.socket_path = str(directory / SOCKET_FILE)
        self._callers = Callers(EngineListener(self.socket_path), self._selector, self.metrics, self._on_hello)
        self._selector.register(self._wake, selectors.EVENT_READ, self._on_wake)
        self._slots: dict[PeerId, Slot] = {}
        self._pools = PoolBroker(self._slots)
        self._failed_rooms = FailedRooms(2 * settings.lease_ns / 1e9)
        self._lives = Lives(directory, settings.worker_port)
        self._restarts = Restarts(wait_min_s=settings.restart_backoff_min_s, wait_max_s=settings.restart_backoff_max_s)
        # The cause of death of a rank's last worker, until the next one serves.
        self._failures: dict[PeerId, str] = {}
        self._life = os.urandom(8).hex()
        self._self_test: subprocess.Popen[bytes] | None = None
        self._self_test_result: SelfTest | None = None
        self._node_facts = node_facts.read()
        self._started_s = time.monotonic()
        self._started_unix_s = time.time()
        self._turned_s = time.monotonic()
        self._stopping_s: float | None = None

    def run(self) -> None:
        """Serve until `stop`; on return all workers have ended and the socket is removed."""
        self._start_self_test()
        try:
            while not self._over():
                for key, _ in self._selector.select(_TURN_S if not self.snapshots.waiting else 0.05):
                    key.data()
                self._turned_s = time.monotonic()
                self._callers.turn(self._turned_s)
                self._reap_self_test()
                self._answer_snapshots()
                self._watch_links()
        finally:
            self._close()

    def stop(self) -> None:
        """Start to drain. Safe in a signal handler."""
        if self._stopping_s is None:
            self._stopping_s = time.monotonic()
            # Once: a later signal may come when the loop has ended and its descriptor is closed.
            self._wake_up()

    def snapshot(self, room: str | None = None) -> AgentSnapshot:
        """Return the current state. Called from HTTP's threads. A silent worker appears with its last known state."""
        return self.snapshots.ask(room)

    # -- engines ---------------------------------------------------------------------------------------------------

    def _on_hello(self, hello: Hello, connection: socket.socket) -> None:
        """Accept an engine. Raises LongshoreError, which refuses it."""
        if self._stopping_s is not None:
            raise LongshoreError("the agent stops and takes no engine now: try again", reason=Reason.SHUTTING_DOWN)
        key = self._reception.admit(hello)
        self._reception.check_siblings(hello, [slot.hello.layout for slot in self._siblings(key) if slot.lives])
        if self.settings.direct:
            self._reception.check_pid(hello, [(slot.config.name, slot.process.pid) for slot in self._gpu_slots()])
        process = process_of(connection)
        if key not in self._slots:
            self._reception.count(process, [(slot.engine, slot.lives) for slot in self._slots.values()])
        self._start_worker(key, hello, connection, process)

    def _start_worker(self, key: PeerId, hello: Hello, connection: socket.socket, engine: PeerProcess) -> None:
        if key in self._slots:
            text = (
                f"{key.replica} rank {key.rank} is registered: wait until its worker has ended, or use a new instance"
            )
            self._callers.turn_away(connection, Reason.BUSY, text)
            return
        if writers := self._pools.writers(key):
            # An engine takes its new worker as proof that no worker writes the pages of the last one.
            text = f"{', '.join(writer.path for writer in writers)} may still write the pages of {key.instance} rank {key.rank}: its last worker has just ended"
            self._callers.turn_away(connection, Reason.BUSY, text)
            return
        now_s = time.monotonic()
        if wait_s := self._restarts.wait_s(key, now_s):
            self._callers.turn_away(connection, Reason.BUSY, self._restarts.told(key, now_s), wait_s)
            return
        self._restarts.starting(key, now_s)
        # See `ways.is_near`.
        life = self._life if hello.device == "cpu" else f"{self._life}{ON_GPU}"
        agent = life if self.settings.direct else ""
        port = self._lives.choose_port(key, self._slots)
        # CUDA cannot open memory of a process with the opener's PID, also if they are in two PID namespaces.
        avoided = {hello.pid, *(slot.hello.pid for slot in self._gpu_slots())} if hello.device != "cpu" else ()
        epoch = self._lives.next_epoch()
        try:
            slot = slots.start(key, hello, connection, engine, self.settings, epoch, port, agent, avoided)
        except OSError as error:
            text = f"no worker can be started now: {error}; raise the limits of the agent's container or process"
            fields = {"instance": key.instance, "worker": key.path, "reason": Reason.BUSY.name}
            _log.warning("%s rank %d: %s", key.instance, key.rank, text, extra=fields)
            self._callers.turn_away(connection, Reason.BUSY, text)
            return
        slot.error = self._failures.get(key, "")
        self._slots[key] = slot
        self._selector.register(slot.link, selectors.EVENT_READ, lambda: self._on_link(slot))
        self._selector.register(slot.pidfd, selectors.EVENT_READ, lambda: self._on_exit(slot))
        _log.info("worker %s started with PID %d", slot.config.name, slot.process.pid, extra=slot.config.about())

    # -- workers ---------------------------------------------------------------------------------------------------

    def _watch_links(self) -> None:
        """Wake the loop when a worker that has not read all of its messages can take more."""
        for slot in self._slots.values():
            if slot.link.closed:
                continue
            key = self._selector.get_key(slot.link)
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if slot.link.wants_write else 0)
            if key.events != events:
                self._selector.modify(slot.link, events, key.data)

    def _on_link(self, slot: Slot) -> None:
        slot.link.flush()
        for message, descriptor in slot.link.receive():
            if isinstance(message, PoolMessage):
                self._pools.forward(slot, message, descriptor)
            else:
                self._obey(slot, message)
            if descriptor is not None:
                os.close(descriptor)
        if slot.link.closed:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(slot.link)

    def _obey(self, slot: Slot, message: NodeMessage) -> None:
        assert isinstance(message, FromWorker)
        if isinstance(message, Started):
            slot.address, slot.near = message.address, message.near
            self._lives.note_port(slot.key, int(main_address(message.address).rpartition(":")[2]))
            if slot.connection is not None:
                for failed in self._failed_rooms.of(slot.key.replica, time.monotonic()):
                    slot.link.send(failed)
                slot.link.send(AdoptEngine(slot.hello), slot.connection.fileno())
                # The worker has a copy. While ours is open, the engine would not see the worker's death.
                slot.connection.close()
                slot.connection = None
        elif isinstance(message, EngineAdopted):
            slot.become(WorkerState.READY)
            self._callers.taken(slot.hello)
            slot.ready_s = slot.since_s
            slot.error = ""
            self._failures.pop(slot.key, None)
            self._publish(slot.key)
        elif isinstance(message, NotStarted):
            _log.error(
                "worker %s cannot start: %s", slot.config.name, message.text, extra=slot.config.about(message.reason)
            )
            if slot.connection is not None:
                self._callers.turn_away(slot.connection, message.reason, message.text, hello=slot.hello)
                slot.connection = None
            slot.become(WorkerState.DRAINING)
            slot.error = ""
            self._restarts.not_started(slot.key, message.text, time.monotonic())
        elif isinstance(message, Retiring):
            slot.error = message.text
            self.metrics.add("longshore_worker_replacements_total", 1)
            _log.warning("worker %s is being replaced: %s", slot.config.name, message.text, extra=slot.config.about())
        elif isinstance(message, Failed):
            slot.become(WorkerState.FAILED)
            slot.error = self._failures[slot.key] = message.text
            fields = slot.config.about(Reason.WORKER_LOST)
            _log.error("worker %s has failed: %s", slot.config.name, message.text, extra=fields)
        elif isinstance(message, EngineLeft) and slot.state is not WorkerState.FAILED:
            slot.become(WorkerState.DRAINING)
            # A replaced worker has reported each room that it failed. Rooms that it finished may continue at siblings.
            if not (slot.error and message.reason is Reason.WORKER_LOST):
                self._tell_siblings(slot.key, SiblingLost(message.reason, message.text))
        elif isinstance(message, RoomFailed):
            if self._failed_rooms.add(slot.key.replica, message, time.monotonic()):
                self._tell_siblings(slot.key, message)
        elif isinstance(message, RoomReported):
            self._telemetry.take(message)
        elif isinstance(message, SnapshotPart) and slot.take_part(message):
            self.snapshots.answered(message.number, slot.key)

    def _on_exit(self, slot: Slot) -> None:
        """Handle the end of a worker's process: expected after its engine left, a failure otherwise."""
        code = slot.process.wait()
        self._selector.unregister(slot.pidfd)
        # Its last messages, which are there even if a message to it has failed.
        self._on_link(slot)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(slot.link)
        if slot.connection is not None:
            self._lives.forget_port(slot.key)
            self._callers.turn_away(
                slot.connection, Reason.WORKER_LOST, f"its worker ended with {code} while it started"
            )
            slot.connection = None
        slot.close()
        if slot.last_snapshot is not None and not slots.is_test(slot.key):
            self._left.add(slot.last_snapshot, tuple(half.label for half in slot.hello.roles), time.monotonic())
        self._pools.ended(slot.key)
        if self._slots.get(slot.key) is slot:
            del self._slots[slot.key]
            if not self._siblings(slot.key):
                self._failed_rooms.forget(slot.key.replica)
            if slots.is_test(slot.key) and slot.state is WorkerState.DRAINING and not slot.error:
                # Each run has new names, and the ports of engines that may return are limited.
                self._lives.forget_port(slot.key)
        if slot.error and slot.state is WorkerState.DRAINING:
            self._restarts.replaced(slot.key, time.monotonic())
        elif slot.state is not WorkerState.DRAINING and self._stopping_s is None:
            _log.error("worker %s ended with %d", slot.config.name, code, extra=slot.config.about(Reason.WORKER_LOST))
            self.metrics.add("longshore_worker_restarts_total", 1)
            why = slot.error if slot.state is WorkerState.FAILED else f"it ended with {code}"
            now_s = time.monotonic()
            served_s = now_s - slot.ready_s if slot.ready_s is not None else 0.0
            self._restarts.died(slot.key, served_s, why, now_s)
            lost = f"the worker of rank {slot.key.rank} was lost: {why}"
            self._tell_siblings(slot.key, SiblingLost(Reason.WORKER_LOST, lost))

    def _gpu_slots(self) -> list[Slot]:
        return [slot for slot in self._slots.values() if slot.lives and slot.hello.device != "cpu"]

    def _siblings(self, key: PeerId) -> list[Slot]:
        return [slot for other, slot in self._slots.items() if other.replica == key.replica and other != key]

    def _tell_siblings(self, key: PeerId, message: RoomFailed | SiblingLost) -> None:
        for slot in self._siblings(key):
            # A worker that has started knows only earlier failures, and may serve its engine before it reports READY.
            if slot.address and slot.state in (WorkerState.STARTING, WorkerState.READY):
                slot.link.send(message)

    def _publish(self, key: PeerId) -> None:
        """Send every rank of an instance the ranks that have registered, but those of an earlier life of its engine."""
        family = [slot for slot in (self._slots[key], *self._siblings(key)) if slot.is_served]
        if not family:
            return
        known = EndpointKnown(self._endpoint(family))
        for slot in family:
            slot.link.send(known)

    @staticmethod
    def _endpoint(family: list[Slot]) -> Endpoint:
        ranks = sorted((slot.rank_address for slot in family), key=lambda address: address.rank)
        return Endpoint(family[0].key.instance, family[0].hello.layout, tuple(ranks), family[0].config.agent)

    # -- status ----------------------------------------------------------------------------------------------------

    def _answer_snapshots(self) -> None:
        for call in self.snapshots.take_new():
            asked = set()
            for key, slot in self._slots.items():
                # A worker that reads nothing cannot answer, and must not collect questions.
                if slot.address and not slot.link.closed and not slot.link.wants_write:
                    slot.link.send(SnapshotWanted(call.number, call.room))
                    asked.add(key)
            call.ask(asked)
        for call in self.snapshots.take_done():
            self._describe(call)

    def _describe(self, call: Call) -> None:
        families: dict[Replica, list[Slot]] = {}
        for slot in self._slots.values():
            if slot.state is WorkerState.READY:
                families.setdefault(slot.key.replica, []).append(slot)
        now_s = time.monotonic()
        call.answer(
            AgentSnapshot(
                deployment=self.settings.deployment,
                node=self.settings.node,
                version=self._reception.version,
                backend=self.settings.backend.value,
                started_unix_s=self._started_unix_s,
                uptime_s=now_s - self._started_s,
                loop_age_s=now_s - self._turned_s,
                restarts=self._restarts.total,
                node_facts=self._node_facts,
                config=self._config_digests,
                draining=self._stopping_s is not None,
                sealed_endpoints=bool(self.settings.keys_directory),
                dying=self._restarts.dying(now_s),
                refused=self._callers.refused(now_s),
                restarts_lately=self._restarts.lately(now_s),
                self_test=self._self_test_result,
                sends_traces=self.settings.otel,
                instances=tuple(
                    InstanceStatus.of(
                        self._endpoint(family),
                        tuple(half.label for half in family[0].hello.roles),
                        {slot.key.rank: (slot.hello.device, slot.near, slot.hello.shown_host) for slot in family},
                        replica.memory,
                    )
                    for replica, family in families.items()
                ),
                workers=tuple(slot.described(self._restarts.count(key)) for key, slot in self._slots.items()),
                left=self._left.engines(now_s),
                left_workers=self._left.snapshots(),
                metrics=self.metrics.snapshot(),
            )
        )

    # -- the self-test ---------------------------------------------------------------------------------------------

    def _start_self_test(self) -> None:
        settings = dataclasses.replace(self.settings, loopback_faults="")
        environment = slots.process_environment() | settings.environment()
        self._self_test = subprocess.Popen(
            [sys.executable, "-m", "longshore_agent.self_test"], stdout=subprocess.PIPE, env=environment
        )
        pidfd = os.pidfd_open(self._self_test.pid)
        self._selector.register(pidfd, selectors.EVENT_READ, lambda: self._unwatch(pidfd))

    def _unwatch(self, pidfd: int) -> None:
        self._selector.unregister(pidfd)
        os.close(pidfd)

    def _reap_self_test(self) -> None:
        if self._self_test is None or self._self_test.poll() is None:
            return
        assert self._self_test.stdout is not None
        said = self._self_test.stdout.read()
        self._self_test.stdout.close()
        try:
            self._self_test_result = msgspec.json.decode(said, type=SelfTest)
        except (msgspec.DecodeError, msgspec.ValidationError):
            text = f"the self-test ended with {self._self_test.returncode} and said nothing"
            self._self_test_result = SelfTest(self.settings.backend.value, UNKNOWN_WIRE, 0, 0.0, text)
        self.metrics.set("longshore_self_test_bytes", self._self_test_result.bytes_moved)
        found = findings.judge(self._self_test_result, findings.Rules.of(self.settings))
        _log.log(logging.INFO if found.ok else logging.ERROR, "%s: %s", found.reason, found.message)
        self._self_test = None

    # -- life ------------------------------------------------------------------------------------------------------

    def _wake_up(self) -> None:
        os.eventfd_write(self._wake, 1)

    def _on_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        if self._stopping_s is not None:
            for slot in self._slots.values():
                if slot.state is not WorkerState.DRAINING:
                    slot.become(WorkerState.DRAINING)
                    # A worker waits until the limit even for rooms that decode has claimed and prefill has not offered.
                    # A prompt that is still being computed looks like one that never comes. Failing the former would
                    # waste its computation; waiting for the latter costs only the rest of the limit.
                    slot.link.send(Drain(self.settings.drain_s))

    def _over(self) -> bool:
        if self._stopping_s is None:
            return False
        return not self._slots or time.monotonic() - self._stopping_s > self.settings.drain_s + slots.KILL_AFTER_S

    def _close(self) -> None:
        # First, because the loop no longer answers requests, and ending the workers may take seconds.
        self.snapshots.close()
        self._callers.close()
        if self._self_test is not None:
            self._self_test.kill()
            self._self_test.communicate()
        for slot in self._slots.values():
            slot.close()
        self._telemetry.close()
        self._selector.close()
        os.close(self._wake)
