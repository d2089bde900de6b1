"""Drives an engine instance whose ranks are processes: starts them, sends them commands and ends them.

Called by the demo and tests, from one thread at a time. Owns the page allocator, as an engine's scheduler does, so that
all ranks use the same page ids. Does not load torch.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Self, TypeVar

import msgspec

from longshore_lab.engine import commands
from longshore_lab.engine.config import RankOptions, check_request
from longshore_lab.engine.errors import EngineError, MissingKVError, RankLostError
from longshore_lab.engine.pages import PageAllocator, pages_for
from longshore_lab.engine.starter import RankProcess, RankStarter
from longshore_wire.errors import Reason

# Time for weights, pools and registrations. On hosts with few cores the ranks start in sequence.
START_TIMEOUT_S = 300.0
# Above the collectives' timeout, so that a rank itself reports a lost sibling.
REPLY_TIMEOUT_S = 180.0
# A rank that does not end within this after Stop is killed.
STOP_TIMEOUT_S = 10.0

ReplyType = TypeVar("ReplyType", bound=commands.Reply)


class EngineProcesses:
    """An engine instance of `options.tp` rank processes; use as a context manager, or call `close`.

    Args:
        options: options of every rank. tp_rank and an empty init_method are filled in here.
        extension_options: options of each rank's extension, by rank; None uses those of `options` for all.
        wait: return only when every rank is ready. Otherwise call `wait_ready`, so that instances start concurrently.
        starter: a starter that several instances share; it must outlive them. None makes one.
    Attributes:
        options: the given options with the effective init_method.
        pids: process ids by rank, once they are ready.
        ready: each rank's layout and pool geometry; empty before they are ready.
        allocator: free pages, the same ids on every rank.
    Raises:
        EngineError: the options are invalid, or a rank failed to start; no process is left.
    """

    def __init__(
        self,
        options: RankOptions,
        extension_options: Sequence[bytes] | None = None,
        *,
        wait: bool = True,
        starter: RankStarter | None = None,
    ) -> None:
        self._directory = tempfile.mkdtemp(prefix="longshore-engine-")
        self._own_starter: RankStarter | None = None
        self._processes: list[RankProcess] = []
        self._connections: list[Connection] = []
        self._unanswered = False
        self.ready: list[commands.Ready] = []
        self.options = options
        if not options.init_method:
            self.options = msgspec.structs.replace(options, init_method=f"file://{self._directory}/rendezvous")
        self.allocator = PageAllocator(options.page_count, options.shuffle_seed)
        try:
            self.options.check()
            if starter is None:
                starter = self._own_starter = RankStarter()
            self._starter = starter
            for _ in range(options.tp):
                self._spawn()
            own = [options.extension_options] * options.tp if extension_options is None else extension_options
            self._post(
                [
                    msgspec.msgpack.encode(msgspec.structs.replace(self.options, tp_rank=rank, extension_options=body))
                    for rank, body in enumerate(own)
                ]
            )
        except BaseException:
            self.close(stop_timeout_s=0.0)
            raise
        if wait:
            self.wait_ready()

    def wait_ready(self) -> None:
        """Wait until every rank has its weights and pool. Raises the constructor's errors. A second call does nothing."""
        if self.ready:
            return
        try:
            self._starter.wait_started()
            self.ready = self.collect(commands.Ready, START_TIMEOUT_S)
        except BaseException:
            # Ranks that wait for each other at the rendezvous do not read a Stop.
            self.close(stop_timeout_s=0.0)
            raise

    @property
    def pids(self) -> list[int]:
        """Process ids by rank."""
        return [process.pid for process in self._processes]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self, stop_timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Stop every rank, by SIGKILL after `stop_timeout_s`, and wait for its end. A second call does nothing."""
        for connection in self._connections:
            try:
                connection.send_bytes(msgspec.msgpack.encode(commands.Stop()))
            except OSError:
                continue
            finally:
                connection.close()
        self._connections.clear()
        deadline_s = time.monotonic() + stop_timeout_s
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._own_starter is not None:
            self._own_starter.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def kill(self, rank: int) -> None:
        """Kill one rank by SIGKILL; the next command raises RankLostError."""
        self._processes[rank].kill()
        self._processes[rank].wait()

    def prefill(self, prompt: Sequence[int], pages: Sequence[int], first: int, end: int) -> commands.Tokens:
        """Compute prompt tokens [first, end) on every rank; see `EngineRank.prefill`."""
        return self.call(commands.Prefill(list(prompt), list(pages), first, end), commands.Tokens)[0]

    def decode(self, pages: Sequence[int], position: int, token: int, count: int = 1) -> commands.Tokens:
        """Feed `token` at `position`, then its successors; see `EngineRank.decode_many`."""
        return self.call(commands.Decode(list(pages), position, token, count), commands.Tokens)[0]

    def generate(self, prompt: Sequence[int], count: int, chunk_tokens: int = 512) -> commands.Tokens:
        """Prefill by chunks and decode `count` tokens; see `EngineRank.generate`."""
        check_request(prompt, count, chunk_tokens)
        pages = self.allocator.allocate(pages_for(len(prompt) + count, self.options.page_size))
        try:
            tokens = self._continue(prompt, pages, count, chunk_tokens)
        except RankLostError:
            raise
        except EngineError:
            self.release(pages)
            raise
        self.release(pages)
        return tokens

    def release(self, pages: Sequence[int]) -> None:
        """Free pages; poison them on every rank if the options say so."""
        if self.options.poison:
            self.call(commands.Poison(list(pages)), commands.Done)
        self.allocator.free(pages)

    def zero(self, pages: Sequence[int], first: int, end: int) -> None:
        """Set KV of tokens [first, end) to zero on every rank."""
        self.call(commands.Zero(list(pages), first, end), commands.Done)

    def digest(self, pages: Sequence[int], first: int, end: int) -> list[commands.HeadDigest]:
        """Return sorted digests of tokens [first, end) over all ranks. Layouts with the same bytes have equal digests."""
        replies = self.call(commands.Digest(list(pages), first, end), commands.Digests)
        return sorted(entry for reply in replies for entry in reply.entries)

    def dump(self, pages: Sequence[int], first: int, end: int) -> list[commands.Dumped]:
        """Return the bytes of tokens [first, end) by rank."""
        return self.call(commands.Dump(list(pages), first, end), commands.Dumped)

    def extra(self, bodies: Sequence[bytes]) -> list[bytes]:
        """Send each rank's extension its bytes, by rank, and return the answers."""
        self._post([msgspec.msgpack.encode(commands.Extra(body)) for body in bodies])
        return [reply.body for reply in self.collect(commands.ExtraReply)]

    def call(self, command: commands.Command, expected: type[ReplyType]) -> list[ReplyType]:
        """Run `command` on every rank and return the replies by rank. Raises the errors of `collect`."""
        self.post(command)
        return self.collect(expected)

    def post(self, command: commands.Command) -> None:
        """Send `command` to every rank and return at once; `collect` must follow before the next command."""
        self._post([msgspec.msgpack.encode(command)] * len(self._connections))

    def collect(self, expected: type[ReplyType], timeout_s: float = REPLY_TIMEOUT_S) -> list[ReplyType]:
        """Wait for every rank's reply to the last command.

        Raises:
            MissingKVError, EngineError: the ranks refused the command; they are ready for the next one.
            RankLostError: a rank ended or did not answer in time; close the instance.
        """
        decoder = msgspec.msgpack.Decoder(commands.Reply)
        replies: dict[int, commands.Reply] = {}
        deadline_s = time.monotonic() + timeout_s
        while len(replies) < len(self._connections):
            open_ranks = {c: rank for rank, c in enumerate(self._connections) if rank not in replies}
            arrived = wait(list(open_ranks), max(0.0, deadline_s - time.monotonic()))
            if not arrived:
                raise RankLostError(f"ranks {sorted(open_ranks.values())} did not answer within {timeout_s:.0f} s")
            for connection in arrived:
                assert isinstance(connection, Connection)
                rank = open_ranks[connection]
                try:
                    replies[rank] = decoder.decode(connection.recv_bytes())
                except (EOFError, ConnectionResetError) as error:
                    raise self._lost(rank) from error
        self._unanswered = False
        return [_expect(expected, rank, replies[rank]) for rank in range(len(self._connections))]

    def _continue(self, prompt: Sequence[int], pages: list[int], count: int, chunk_tokens: int) -> commands.Tokens:
        first = commands.Tokens([], [])
        for begin in range(0, len(prompt), chunk_tokens):
            first = self.prefill(prompt, pages, begin, min(begin + chunk_tokens, len(prompt)))
        if count == 1:
            return first
        rest = self.decode(pages, len(prompt), first.tokens[0], count - 1)
        return commands.Tokens(first.tokens + rest.tokens, first.margins + rest.margins)

    def _spawn(self) -> None:
        own, other = socket.socketpair()
        self._connections.append(Connection(own.detach()))
        self._processes.append(self._starter.start(other))

    def _post(self, bodies: Sequence[bytes]) -> None:
        """Send each rank its bytes.

        Raises:
            EngineError: the last command was not collected, as after an interrupt, so replies could be confused.
            RankLostError: a rank has ended.
        """
        if self._unanswered:
            raise EngineError("the last command was not collected: collect it, or close the instance")
        self._unanswered = True
        for rank, (connection, body) in enumerate(zip(self._connections, bodies, strict=True)):
            try:
                connection.send_bytes(body)
            except (BrokenPipeError, ConnectionResetError) as error:
                raise self._lost(rank) from error

    def _lost(self, rank: int) -> RankLostError:
        process = self._processes[rank]
        try:
            status = process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            # It closed its end but hangs during its exit. Nothing of it is needed any more.
            process.kill()
            status = process.wait()
        return RankLostError(
            f"rank {rank} of {self.options.tp} (process {process.pid}) ended with status {status}: "
            f"start the instance again"
        )


def _expect(expected: type[ReplyType], rank: int, reply: commands.Reply) -> ReplyType:
    if isinstance(reply, commands.Failed):
        kind = MissingKVError if reply.reason == Reason.TOKENS_MISSING else EngineError
        raise kind(f"rank {rank}: {reply.message}", reason=Reason(reply.reason))
    assert isinstance(reply, expected), f"rank {rank} answered {type(reply).__name__}"
    return reply
