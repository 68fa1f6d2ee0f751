"""A listening worker: it starts a process for each job that connects, and ends it."""

import os
import select
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from jaxinfer.runtime.kv.sockets import be_acknowledged, join_address, let_in, listen
from jaxinfer.runtime.processes.peers import END_S, Ended, Greeting, how_ended, start_worker


class WorkerServer:
    """Starts a process for each job that connects, until it is closed.

    Args:
        say: receives a line about each job.

    Attributes:
        address: ``HOST:PORT`` at which the server listens.

    Raises:
        OSError: the address is not available.
    """

    def __init__(self, host: str, port: int, key: str, say: Callable[[str], None]) -> None:
        self._listener = listen(host, port)
        self.address = join_address(host, self._listener.getsockname()[1])
        self._key, self._say = key.encode(), say
        self._jobs: set[subprocess.Popen[bytes]] = set()

    def serve(self) -> None:
        """Serve jobs until an exception ends the server and all jobs."""
        try:
            while True:
                try:
                    caller, (host, port, *_) = self._listener.accept()
                except OSError:
                    time.sleep(0.1)  # It is gone already, or there are too many.
                    continue
                threading.Thread(
                    target=self._serve, args=(caller, join_address(host, port)), daemon=True
                ).start()
        finally:
            self._listener.close()
            for job in list(self._jobs):
                job.kill()

    def _serve(self, caller: socket.socket, name: str) -> None:
        try:
            with let_in(caller, self._key):
                self._work(caller, name)
        except (OSError, EOFError) as error:
            self._say(f"{name}: {error}")

    def _work(self, caller: socket.socket, name: str) -> None:
        be_acknowledged(caller)
        connection: Connection[Any, Any]
        with Connection(os.dup(caller.fileno())) as connection:
            while (asked := connection.recv()) is None:
                connection.send(Greeting(time.perf_counter(), caller.getsockname()[0]))
            job = start_worker(caller, asked)
            self._jobs.add(job)
            self._say(f"{name}: process {job.pid} works for it")
            code = _end_of(job, caller)
            self._jobs.discard(job)
            self._say(f"{name}: process {job.pid} {how_ended(code)}")
            with suppress(OSError):
                connection.send(Ended(code))


def _end_of(job: "subprocess.Popen[bytes]", caller: socket.socket) -> int:
    """Wait until a job has ended, but only a few seconds once its caller has gone."""
    watched = os.pidfd_open(job.pid)
    try:
        poll = select.poll()
        poll.register(watched, select.POLLIN)
        poll.register(caller, select.POLLRDHUP)
        poll.poll()
    finally:
        os.close(watched)
    try:
        return job.wait(END_S)
    except subprocess.TimeoutExpired:
        job.kill()
        return job.wait()
