"""Keeps a client connected to its agent: owns the socket, its thread, and the descriptors.

Used by `client.Client` only. `AgentSocket` moves messages and descriptors. `Connection` passes messages and time to the
core and applies the core's effects. It decides nothing and knows nothing of rooms, pools or calls. `Waits` lets a thread
that waits for a message read it from the socket itself.
"""

from __future__ import annotations

import array
import errno
import os
import select
import socket
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress

from longshore_client.core import Core, State
from longshore_client.errors import ArgumentError, ConnectError
from longshore_client.ledger import Call, Outgoing
from longshore_wire.engine_messages import ENGINE_MESSAGE_BYTES_MAX, TO_ENGINE, Hello, RoomEvent, ToEngine
from longshore_wire.errors import CodecError, LongshoreError
from longshore_wire.layout import TargetMemory
from longshore_wire.names import AGENT_USER_ID

# Pause after the kernel had no memory for a message.
STARVED_WAIT_S = 0.01
# `select.poll` takes at most 2**31 ms.
POLL_MAX_S = 3600.0
# Messages read before callers get the lock again.
RECEIVE_BATCH_MAX = 64
# Another kind of socket; a file where the path needs a folder; a loop of links.
_NEVER_AN_AGENT = frozenset({errno.EPROTOTYPE, errno.ENOTDIR, errno.ELOOP})
_STARVED = frozenset({errno.ENOBUFS, errno.ENOMEM, errno.ETOOMANYREFS})
# As a number: operators of flags of `enum` take as long as the system call.
_CUT = int(socket.MSG_TRUNC)
# Interval of the warnings while no agent has welcomed this engine.
WAIT_LOG_S = 10.0
_WHERE = "give the path of the engine socket that the agent's log names"
_REMEDY = (
    f"give the engine's pod securityContext.supplementalGroups: [{AGENT_USER_ID}], or on a machine of your own the group "
    "of the agent; if it has that group, SELinux or AppArmor refuses it"
)


class ConnectionEndedError(ConnectionError):
    """The agent's end of the socket is closed."""


class AgentSocket:
    """A connected, non-blocking SOCK_SEQPACKET socket. Not thread-safe: its owner locks.

    Attributes:
        starved: the kernel had no memory for the first message of the outbox; try again after a pause.
    """

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        self._socket = connected
        self.starved = False

    @classmethod
    def dial(cls, path: str) -> AgentSocket:
        """Connect to an agent.

        Raises:
            ConnectError: no agent listens at what is there.
            OSError: another attempt may succeed; a PermissionError says what this process lacks.
        """
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connected.setblocking(False)
            connected.connect(path)
        except PermissionError as error:
            connected.close()
            raise PermissionError(_what_is_lacking(path)) from error
        except OSError as error:
            connected.close()
            if not _can_be_an_agent(path, error):
                raise ConnectError(f"{path} is no socket of an agent ({error}): {_WHERE}") from error
            raise
        return cls(connected)

    def fileno(self) -> int:
        """Return the socket's descriptor."""
        return self._socket.fileno()

    def flush(self, outbox: deque[Outgoing]) -> None:
        """Send as many messages as the socket accepts and remove them from `outbox`. Raises OSError if it is closed."""
        self.starved = False
        while outbox:
            data, descriptors = outbox[0]
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
            try:
                self._socket.sendmsg([data], rights, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno not in _STARVED:
                    raise
                self.starved = True
                return
            outbox.popleft()

    def receive(self) -> list[ToEngine]:
        """Return available messages, at most RECEIVE_BATCH_MAX.

        Raises:
            ConnectionEndedError, OSError: the connection is closed.
            CodecError: the agent sent an invalid message.
        """
        messages: list[ToEngine] = []
        while len(messages) < RECEIVE_BATCH_MAX:
            try:
                # With no space for control data, the kernel closes descriptors, which an agent must not send.
                data, _, flags, _ = self._socket.recvmsg(ENGINE_MESSAGE_BYTES_MAX)
            except BlockingIOError:
                break
            if flags & _CUT:
                raise CodecError(f"a message above {ENGINE_MESSAGE_BYTES_MAX} bytes")
            if not data:
                if messages:
                    break  # the end stays readable, so the next call reports it
                raise ConnectionEndedError("the agent closed the connection")
            messages.append(TO_ENGINE.decode(data))
        return messages

    def close(self) -> None:
        """Close the socket, and wake a thread that polls it. Idempotent."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def _warn(text: str) -> None:
    # Its import would be a tenth of that of this package, and few engines wait that long.
    import logging

    logging.getLogger("longshore.client").warning(text)


def _can_be_an_agent(path: str, error: OSError) -> bool:
    """Return whether an agent may answer later at a path that fails now. A file of another kind stays."""
    if error.errno in _NEVER_AN_AGENT:
        return False
    if error.errno != errno.ECONNREFUSED:
        return True
    try:
        return stat.S_ISSOCK(os.stat(path).st_mode)  # noqa: PTH116 -- as below
    except OSError:
        return True


def _what_is_lacking(path: str) -> str:
    """Return why the kernel does not let this process connect, and the remedy."""
    own = f"user {os.geteuid()}, groups {', '.join(map(str, sorted({os.getegid(), *os.getgroups()})))}"
    try:
        # pathlib would be a twelfth of the import of this package.
        found = os.stat(path)  # noqa: PTH116
    except OSError:
        # The socket's folder is closed to this process.
        return f"{path} is not accessible to this process ({own}): {_REMEDY}"
    return (
        f"{path} is for user {found.st_uid} and group {found.st_gid} (mode {stat.S_IMODE(found.st_mode):04o}), "
        f"and this process has {own}: {_REMEDY}"
    )


class Waits(threading.Condition):
    """The lock of one client's cores. One thread at a time that waits for a change reads the sockets itself.

    The answer to a call then wakes its caller, not the connection's thread first. Further waiting threads are notified, and
    so is the main thread: Python runs signal handlers there, and one that raises would lose a message that is half read.

    Attributes:
        links: the client's connections.
    """

    def __init__(self) -> None:
        super().__init__()
        self._process_id = os.getpid()
        self.links: list[Connection] = []
        self._is_reading = False
        self._wake_reader = -1  # a descriptor that wakes the thread that polls the sockets; -1: none does

    def __enter__(self) -> bool:
        """Take the lock. Raise ArgumentError in a forked child: a thread that it does not have may hold the lock for ever."""
        if os.getpid() != self._process_id:
            raise ArgumentError(f"this client belongs to process {self._process_id}: connect in this one")
        return super().__enter__()

    def wait_until(self, predicate: Callable[[], bool], timeout_s: float | None) -> bool:
        """Wait until `predicate` is true, at most `timeout_s` (None: no limit); return its value.

        Called under the lock, held once.
        """
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        while not (found := predicate()):
            left_s = None if end_s is None else end_s - time.monotonic()
            if left_s is not None and left_s <= 0:
                break
            if not self.read(left_s):
                self.wait(left_s)
        return found

    def read(self, timeout_s: float | None) -> bool:
        """Read the sockets until one has a message, at most `timeout_s` seconds (None: no limit).

        Called under the lock, held once, which is free while this thread waits.

        Returns:
            False: this thread is to wait for a notification. Nothing was read.
        """
        if self._is_reading or threading.current_thread() is threading.main_thread():
            return False
        lent = {found.fileno(): (link, found) for link in self.links if (found := link.lendable) is not None}
        if not lent:
            return False
        try:
            self._wake_reader = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        except OSError:
            return False  # no descriptor is left
        self._is_reading = True
        try:
            poller = select.poll()
            poller.register(self._wake_reader, select.POLLIN)
            for descriptor, (link, _) in lent.items():
                link.lend(is_lent=True)
                poller.register(descriptor, select.POLLIN)
            self.release()
            try:
                ready = poller.poll(None if timeout_s is None else min(timeout_s, POLL_MAX_S) * 1e3)
            finally:
                self.acquire()
                os.close(self._wake_reader)
                self._wake_reader = -1
            for descriptor, _ in ready:
                if descriptor in lent:
                    link, found = lent[descriptor]
                    link.read(found)
        finally:
            self._is_reading = False
            for link, _ in lent.values():
                link.lend(is_lent=False)
        return True

    def wake(self, *, news: bool) -> None:
        """Wake the thread that reads, and with `news` those that wait for it, after another thread has changed a core."""
        if self._wake_reader >= 0:
            os.eventfd_write(self._wake_reader, 1)
        if news:
            self.notify_all()


class Connection:
    """Keeps one connection to an agent alive until `close`.

    Attributes:
        changed: the lock of the core and of its callers. The connections of one client share it, as their cores share events.
    """

    def __init__(self, path: str, core: Core, changed: Waits) -> None:
        self.changed = changed
        changed.links.append(self)
        self.core = core
        self._path = path
        self._process_id = os.getpid()
        self._socket: AgentSocket | None = None
        self._waiting: dict[int, threading.Event] = {}  # by number of the call
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = select.epoll()
        self._poller.register(self._wake, select.EPOLLIN)
        self._watched = 0  # events of the socket for which the thread polls
        self._is_lent = False  # a waiting caller reads the socket
        # A daemon thread does not keep an engine alive that ends without `close`.
        self._thread = threading.Thread(target=self._run, name="longshore-link", daemon=True)

    # -- callers' threads ------------------------------------------------------------------------------------------

    def start(self, timeout_s: float, left_s: float) -> None:
        """Connect; return when an agent has sent Welcome within the `left_s` that are left of `timeout_s`.

        Raises:
            HelloRefused, CodecError, ConnectError: no agent has; the connection is closed.
        """
        self._thread.start()
        end_s = time.monotonic() + left_s
        with self.changed:
            while not self.changed.wait_until(self._is_settled, min(left_s, WAIT_LOG_S)):
                left_s = end_s - time.monotonic()
                if left_s <= 0:
                    break
                _warn(f"{self.core.connect_error(timeout_s - left_s)}; trying for {left_s:.0f} s more")
            if self.core.state is State.READY:
                return
            error = self.core.connect_error(timeout_s)
        self.close()
        raise error

    def _is_settled(self) -> bool:
        return self.core.state in (State.READY, State.CLOSED)

    def carry_out(self) -> None:
        """Apply the core's effects. Called under the lock, after each change of the core."""
        self._carry_out()
        if self.core.outbox:
            os.eventfd_write(self._wake, 1)

    def expect(self, call: Call) -> None:
        """Prepare to wait for an entered call. Called under the lock, before `carry_out`."""
        self._waiting[call.number] = threading.Event()

    def wait(self, call: Call, timeout_s: float | None) -> bool:
        """Wait until a call is settled and its effects are applied, at most `timeout_s` (None: no limit).

        Call `expect` first. Returns whether the call is settled.
        """
        event = self._waiting.get(call.number)
        if event is None:
            return True
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        left_s = timeout_s
        with self.changed:
            while not event.is_set() and (left_s is None or left_s > 0) and self.changed.read(left_s):
                left_s = None if end_s is None else end_s - time.monotonic()
        return event.wait(left_s)

    @property
    def lendable(self) -> AgentSocket | None:
        """The socket, if a waiting caller may read it now. Read under the lock."""
        return self._socket if self.core.state is State.READY else None

    def lend(self, *, is_lent: bool) -> None:
        """Leave the socket's messages to a waiting caller, or read them again. Called under the lock."""
        self._is_lent = is_lent
        self._watch()

    def read(self, connected: AgentSocket) -> None:
        """Receive what a lent socket has, for the waiting caller. Called under the lock."""
        if connected is not self._socket:
            return  # closed while the caller waited for the lock
        self._receive(connected, time.monotonic())
        if self.core.state is not State.READY or self.core.outbox:
            os.eventfd_write(self._wake, 1)  # the thread connects again, ends, or sends

    def close(self) -> None:
        """End the thread and the connection; calls and waits in other threads end. Idempotent.

        Does nothing in a forked child: the connection belongs to its parent.
        """
        if os.getpid() != self._process_id:
            return
        with self.changed:
            if self.core.state is not State.CLOSED:
                self.core.close()
                self._carry_out()
                os.eventfd_write(self._wake, 1)
        if self._thread is not threading.current_thread():
            self._thread.join()

    # -- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self.core.state is not State.CLOSED:
                self._turn()
        finally:
            # Also after a bug of ours: waiting callers must learn that no answer will come.
            with self.changed:
                self.core.close()
                self._carry_out()
                self._hang_up()
                self._poller.close()
                os.close(self._wake)

    def _turn(self) -> None:
        with self.changed:
            wait_s = self._advance(time.monotonic())
            connected = self._socket
            if connected is not None and connected.starved:
                wait_s = min(wait_s, STARVED_WAIT_S)
            self._watch()
        ready = dict(self._poller.poll(max(wait_s, 0.0)))
        with self.changed:
            if ready.pop(self._wake, None):
                os.eventfd_read(self._wake)
            if connected is not None and connected is self._socket and (ready or self.core.outbox):
                self._exchange(connected, time.monotonic())

    def _watch(self) -> None:
        """Poll the socket for what the thread has to do with it now. Called under the lock."""
        connected, wanted = self._socket, 0
        if connected is None:
            return
        if not self._is_lent:
            wanted |= select.EPOLLIN
        if self.core.outbox and not connected.starved:
            wanted |= select.EPOLLOUT
        if wanted == self._watched:
            return
        if not wanted:
            # A registered descriptor reports its end even for no event.
            self._poller.unregister(connected.fileno())
        elif self._watched:
            self._poller.modify(connected.fileno(), wanted)
        else:
            self._poller.register(connected.fileno(), wanted)
        self._watched = wanted

    def _advance(self, now_s: float) -> float:
        """Connect if necessary and do all due work; return the time until more is due, in seconds."""
        if self.core.should_dial(now_s):
            try:
                self._socket = AgentSocket.dial(self._path)
            except OSError as error:
                self.core.disconnected(error, now_s)
            else:
                self.core.connected(now_s)
        wait_s = self.core.advance(now_s)
        self._carry_out()
        self._hang_up()
        return wait_s

    def _exchange(self, connected: AgentSocket, now_s: float) -> None:
        """Send and receive available messages; leave those of a lent socket to the caller that reads it."""
        try:
            connected.flush(self.core.outbox)
        except OSError as error:
            self.core.disconnected(error, now_s)
        if not self._is_lent and self.core.state is not State.DOWN:
            self._receive(connected, now_s)
            return
        self._carry_out()
        self._hang_up()

    def _receive(self, connected: AgentSocket, now_s: float) -> None:
        """Receive available messages."""
        try:
            for message in connected.receive():
                self.core.take(message, now_s)
        except (OSError, CodecError) as error:
            self.core.disconnected(error, now_s)
        self._carry_out()
        self._hang_up()

    def _carry_out(self) -> None:
        if self._socket is not None and self.core.outbox:
            try:
                self._socket.flush(self.core.outbox)
            except OSError as error:
                # The thread will also see the broken connection, and then repeats unanswered calls to the next agent.
                self.core.last_error = str(error)
        effects = self.core.take_effects()
        for text in effects.warnings:
            _warn(text)
        # Close before waking callers: when the call of a refused or withdrawn pool returns, no descriptor is open.
        for descriptor in effects.unused:
            os.close(descriptor)
        for call in effects.settled:
            event = self._waiting.pop(call.number, None)
            if event is not None:
                event.set()
        if effects.settled or effects.news:
            self.changed.wake(news=effects.news)

    def _hang_up(self) -> None:
        """Close the socket if the core no longer needs it. Called under the lock."""
        if self._socket is not None and self.core.state in (State.DOWN, State.CLOSED):
            if self._watched:
                self._poller.unregister(self._socket.fileno())
                self._watched = 0
            self._socket.close()
            self._socket = None


def open_links(path: str, hellos: Mapping[TargetMemory, Hello], timeout_s: float) -> dict[TargetMemory, Connection]:
    """Open one client's connections, one for each memory; return when an agent has sent Welcome on all.

    Raises:
        HelloRefused, CodecError, ConnectError: no agent has within `timeout_s`; all are closed.
    """
    changed, events = Waits(), deque[RoomEvent]()
    links: dict[TargetMemory, Connection] = {}
    end_s = time.monotonic() + timeout_s
    for memory, hello in hellos.items():
        link = Connection(path, Core(hello, path, events), changed)
        try:
            link.start(timeout_s, max(0.0, end_s - time.monotonic()))
        except LongshoreError:
            for started in links.values():
                started.close()
            raise
        links[memory] = link
    return links
