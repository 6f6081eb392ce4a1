"""Starts a server, tells the person who started it, and ends it without a trace.

    bind the port -> start the processes -> answer HTTP (503 until they are ready) -> ready line
    Ctrl-C, SIGTERM, or process --parent-pid ends
        -> refuse new requests, let open ones finish a while, end everything

The port is bound and the places of slower tiers are looked at before anything is loaded, so that a
port or a directory in use is an error of the first second.

This module holds no request and knows no route.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import uvicorn

from statewise.runtime.clock import SystemClock
from statewise.runtime.config import ServerArgs
from statewise.runtime.errors import OperatingError
from statewise.runtime.server import arguments, links, logs
from statewise.runtime.server.broker import Broker
from statewise.runtime.server.http.app import make_app
from statewise.runtime.server.http.protocol import BoundedHttpProtocol
from statewise.runtime.server.metrics import Metrics
from statewise.runtime.server.parent import ParentWatch
from statewise.runtime.server.rpc import RpcEndpoint, check_rpc_settings
from statewise.runtime.server.service import Service, model_name_of
from statewise.runtime.server.supervisor import MODULES, Supervisor
from statewise.runtime.tiers.places import check_places

ABORT_GRACE_S = 0.5  # for terminal events of aborted requests to reach their clients
HTTP_GRACE_S = 2  # for answers being written when the server stops
HANG_UP_S = 2  # for requests to notice that their connection is gone
STOPPING = "the server is stopping"
EXIT_FAILED = 1
BACKLOG = 2048  # connections that wait to be accepted

log = logging.getLogger(__name__)


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises OperatingError that says what to do where it cannot.

    It listens at once: two servers may both bind a port on which nobody listens yet.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise OperatingError(
            f"cannot listen on {host} port {port}: {error.strerror or error}; choose another --port"
        ) from error
    listener.setblocking(False)
    return listener


def raise_file_limit() -> None:
    """Allow as many open files, and so clients, as the system lets this process have."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def url_of(listener: socket.socket) -> str:
    """Return the URL a person can open (a wildcard address is shown as loopback)."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)
    if ":" in host and not host.startswith("["):
        host = f"[{host}]"
    return f"http://{host}:{port}"


class Server:
    """One server from start to end. `run` is called once."""

    def __init__(self, args: ServerArgs, modules: Mapping[str, str]) -> None:
        check_rpc_settings(args)
        check_places(args.disk_cache_dir, args.remote_cache, args.cache_key_file)
        self._args = args
        self._clock = SystemClock()
        self._listener = bind(args.host, args.port)
        self._directory = links.SocketDirectory()
        metrics = Metrics(model_name_of(args), with_sglang_names=args.sglang_metrics)
        inbox = self._directory.address(links.SERVER, 0)
        max_open = args.max_queued_requests + args.max_running_requests
        try:
            self._broker = Broker(inbox, max_open, self._clock, metrics)
        except OperatingError:
            self._directory.remove()
            raise
        self._service = Service(args, self._broker, metrics, self._clock)
        self._supervisor = Supervisor(args, self._directory, self._clock, self._service, modules)
        self._service.supervisor = self._supervisor
        metrics.engine_stats = self._service.load
        self._broker.on_ready = self._supervisor.ready
        self._broker.on_heartbeat = self._supervisor.heartbeat
        self._rpc: RpcEndpoint | None = None
        self._stop_asked = asyncio.Event()
        self._num_signals = 0

    async def run(self) -> int:
        """Serve until asked to stop or unable to go on; returns the exit status."""
        loop = asyncio.get_running_loop()
        for sig in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(sig, self._on_signal)
        self._broker.start()
        http = _make_http(self._service)
        http_task = asyncio.create_task(http.serve(sockets=[self._listener]))
        parent = self._watch_parent()
        watch = None
        try:
            if self._args.rpc:
                self._rpc = RpcEndpoint(self._service)
                self._rpc.start()
            self._supervisor.start()
            watch = asyncio.create_task(self._supervisor.watch())
            await self._until_ended(http_task, watch)
        finally:
            await self._drain()
            await self._end_http(http, http_task)
            await self._supervisor.stop()
            if watch is not None:
                await watch
            if parent is not None:
                parent.close()
            if self._rpc is not None:
                self._rpc.close()
            self._broker.close()
            self._directory.remove()
        return EXIT_FAILED if self._supervisor.failure else 0

    def _watch_parent(self) -> ParentWatch | None:
        pid = self._args.parent_pid
        return ParentWatch(pid, self._on_parent_end) if pid else None

    def _on_parent_end(self) -> None:
        log.warning("process %d has ended, and this server with it", self._args.parent_pid)
        self._on_signal()

    def _on_signal(self) -> None:
        self._num_signals += 1
        self._stop_asked.set()

    async def _until_ended(self, *tasks: asyncio.Task[None]) -> None:
        """Wait for a signal, for the supervisor to give up, or for the end of one of `tasks`."""
        stop = asyncio.create_task(self._stop_asked.wait())
        ended = asyncio.create_task(self._service.ended.wait())
        serving = asyncio.create_task(self._service.serving.wait())
        serving.add_done_callback(lambda task: None if task.cancelled() else self._say_ready())
        try:
            await asyncio.wait({stop, ended, *tasks}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (stop, ended, serving):
                task.cancel()
            await asyncio.gather(stop, ended, serving, return_exceptions=True)

    def _say_ready(self) -> None:
        for line in self._service.info(links.SCHEDULER).get("lines", []):
            log.info("%s", line)
        url = url_of(self._listener)
        if self._rpc is not None:
            log.info("RPC at %s", self._rpc.endpoint)
        print(ready_line(url, self._service.model_name, self._args.api_key), flush=True)

    async def _drain(self) -> None:
        """Refuse new requests, let the open ones finish a while, abort the rest."""
        self._service.drain()
        if self._supervisor.failure:
            return
        patience = self._clock.monotonic() + self._args.drain_timeout
        signals = self._num_signals
        while self._broker.num_open and self._clock.monotonic() < patience:
            if self._num_signals > signals:
                break
            await asyncio.sleep(0.02)
        if self._broker.num_open:
            log.warning("aborting %d open requests", self._broker.num_open)
            self._broker.abort_client_rid("", STOPPING)
            patience = self._clock.monotonic() + ABORT_GRACE_S
            while self._broker.num_open and self._clock.monotonic() < patience:
                await asyncio.sleep(0.02)

    async def _end_http(self, http: uvicorn.Server, task: asyncio.Task[None]) -> None:
        """Tell every reader that it is over, let answers be written a while, and hang up."""
        self._broker.end_all(STOPPING)
        http.should_exit = True
        await asyncio.wait({task}, timeout=HTTP_GRACE_S)
        for connection in list(http.server_state.connections):
            connection.transport.abort()  # as if the client had gone away
        with suppress(asyncio.CancelledError):
            await task


def ready_line(url: str, model_name: str, api_key: str) -> str:
    """Return what is printed once, on standard output, when the server serves."""
    key = " -H 'Authorization: Bearer ...'" if api_key else ""
    body = '{"text": "The capital of France is", "sampling_params": {"max_new_tokens": 16}}'
    return (
        f"statewise is ready: {model_name} at {url}\n"
        f"  curl {url}/generate{key} -H 'Content-Type: application/json' -d '{body}'"
    )


class _Http(uvicorn.Server):
    """The HTTP server; signals are the business of whoever runs it."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield


def _make_http(service: Service) -> uvicorn.Server:
    config = uvicorn.Config(
        make_app(service),
        http=BoundedHttpProtocol,
        ws="none",
        loop="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        backlog=BACKLOG,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=HTTP_GRACE_S + HANG_UP_S,
        server_header=False,
    )
    return _Http(config)


def serve(args: ServerArgs, modules: Mapping[str, str] = MODULES) -> int:
    """Run a server in this process until it ends; returns the exit status.

    `modules` names the Python module of each child process.
    """
    logs.set_up("server", args.log_level)
    raise_file_limit()
    try:
        return asyncio.run(_serve(args, modules))
    except OperatingError as error:
        log.error("%s", error)
        return EXIT_FAILED


async def _serve(args: ServerArgs, modules: Mapping[str, str]) -> int:
    return await Server(args, modules).run()


def main(argv: Sequence[str] | None = None, prog: str = "statewise serve") -> int:
    """Start a server from a command line."""
    return serve(arguments.parse(sys.argv[1:] if argv is None else argv, prog))
