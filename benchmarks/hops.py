"""Measures the latency of waking an idle thread, process or ZeroMQ peer, and of small work on a GPU.

    python benchmarks/hops.py

A transfer wakes about six threads and processes in turn. On a virtual machine with idle cores each wake-up takes longer
than the slab. The times are halves of a round trip: medians and 90th percentiles.
"""

from __future__ import annotations

import multiprocessing
import queue
import statistics
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import numpy as np
import zmq

REST_S = 0.003
REPETITIONS = 200


def measure(name: str, trip: Callable[[], object], *, hops: int = 2) -> None:
    """Print the time of one hop of a round trip."""
    samples = []
    for _ in range(REPETITIONS):
        time.sleep(REST_S)
        begin = time.perf_counter()
        trip()
        samples.append((time.perf_counter() - begin) / hops * 1e6)
    p90 = sorted(samples)[int(0.9 * len(samples))]
    print(f"{name:44} p50 {statistics.median(samples):6.0f} us  p90 {p90:6.0f} us", flush=True)


def measure_threads() -> None:
    """Measure two threads with two queues."""
    there: queue.SimpleQueue[bool] = queue.SimpleQueue()
    back: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def answer() -> None:
        while there.get():
            back.put(True)

    def trip() -> None:
        there.put(True)
        back.get()

    threading.Thread(target=answer, daemon=True).start()
    measure("between threads, by a queue", trip)
    there.put(False)


def answer_pipe(pipe: Connection) -> None:
    """The process of `measure_processes` that answers over a socket pair."""
    while pipe.recv_bytes() == b"x":
        pipe.send_bytes(b"x")


def answer_socket(pipe: Connection) -> None:
    """The process of `measure_processes` that answers over ZeroMQ."""
    socket = zmq.Context().socket(zmq.ROUTER)
    pipe.send(f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}")
    while (message := socket.recv_multipart())[1] != b"end":
        socket.send_multipart(message)


def measure_processes() -> None:
    """Measure two processes with a socket pair and with ZeroMQ."""
    context = multiprocessing.get_context("spawn")
    near, far = context.Pipe()

    def trip() -> None:
        near.send_bytes(b"x")
        near.recv_bytes()

    process = context.Process(target=answer_pipe, args=(far,))
    process.start()
    trip()
    measure("between processes, by a socket pair", trip)
    near.send_bytes(b"end")
    process.join()
    process = context.Process(target=answer_socket, args=(far,))
    process.start()
    socket = zmq.Context().socket(zmq.DEALER)
    socket.connect(near.recv())
    measure("between processes, by ZeroMQ", lambda: (socket.send(b"x"), socket.recv()))
    socket.send(b"end")
    process.join()


def measure_device() -> None:
    """Measure a copy of page ids to a GPU, awaited and queued, and a small kernel, awaited."""
    import torch

    if not torch.cuda.is_available():
        print("no CUDA device: work for a GPU is left out")
        return
    ids, stream = np.arange(512, dtype=np.int32), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    held = torch.tensor(ids, device="cuda:0")

    def wait_for_ids() -> None:
        torch.tensor(ids, dtype=torch.int32, device="cuda:0")
        torch.cuda.current_stream().synchronize()

    def queue_ids() -> None:
        with torch.cuda.stream(stream):
            torch.tensor(ids).pin_memory().to("cuda:0", non_blocking=True)

    def wait_for_kernel() -> None:
        with torch.cuda.stream(stream):
            held.add_(1)
        stream.synchronize()

    measure("page ids to the GPU, awaited", wait_for_ids, hops=1)
    measure("page ids to the GPU, pinned and queued", queue_ids, hops=1)
    measure("a small kernel, awaited", wait_for_kernel, hops=1)


def main() -> None:
    """Print the table."""
    measure_threads()
    measure_processes()
    measure_device()


if __name__ == "__main__":
    main()
