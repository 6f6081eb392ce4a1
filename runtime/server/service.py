"""What every door of a server shares: settings, the broker, the processes, the counters.

    HTTP routes --+
                  +--> Service --> Broker (requests), Supervisor (processes), Metrics
    RPC endpoint -+

This module starts nothing; launch.py puts the parts together.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import msgspec

from statewise.runtime.clock import Clock
from statewise.runtime.config import ServerArgs
from statewise.runtime.errors import InvalidRequestError, OperatingError, RefusedError
from statewise.runtime.messages import GenerateRequest, pack_ids
from statewise.runtime.sampling_params import SamplingParams
from statewise.runtime.server import links
from statewise.runtime.server.broker import Broker
from statewise.runtime.server.metrics import Metrics
from statewise.runtime.server.supervisor import ServerState, Supervisor

PROBE_TIMEOUT_S = 20.0
UPDATE_TIMEOUT_S = 1800.0  # to read and prepare the weights of a large model
SECRET_SETTINGS = ("api_key", "admin_api_key", "rpc_secret_key_file")

log = logging.getLogger(__name__)


def model_name_of(args: ServerArgs) -> str:
    """Return the name in responses: the one asked for, or the model path's last part."""
    return args.served_model_name or Path(args.model_path).name or args.model_path


class Service:
    """One server's shared state. Implements the supervisor's `Listener`."""

    def __init__(self, args: ServerArgs, broker: Broker, metrics: Metrics, clock: Clock) -> None:
        self.args = args
        self.broker = broker
        self.metrics = metrics
        self.clock = clock
        self.supervisor: Supervisor | None = None  # set once, before anything runs
        self.is_draining = False
        self.serving = asyncio.Event()  # set once the server serves for the first time
        self.ended = asyncio.Event()  # set when it cannot go on
        self._probe: asyncio.Task[None] | None = None

    # ------------------------------------------------------------- Listener

    def process_started(self, process: str, address: str) -> None:
        """See `Listener`."""
        self.broker.process_started(process, address)

    def process_died(self, process: str, reason: str) -> None:
        """See `Listener`."""
        self.metrics.process_died(process)
        self.broker.process_died(process, reason)

    def state_changed(self, state: ServerState) -> None:
        """See `Listener`."""
        self.metrics.state_changed(state is ServerState.SERVING)
        self._set_refusal(state)
        if state is ServerState.SERVING:
            if self.serving.is_set():
                log.info("all processes are ready again")
            self.serving.set()
        if state in (ServerState.FAILED, ServerState.STOPPED):
            self.ended.set()

    def drain(self) -> None:
        """Take no more requests; those that run go on."""
        self.is_draining = True
        self.broker.refusal = "the server is stopping"

    def _set_refusal(self, state: ServerState) -> None:
        if self.is_draining:
            return
        reasons = {
            ServerState.SERVING: None,
            ServerState.STARTING: "the server is starting",
            ServerState.DEGRADED: "a process died and is being restarted",
        }
        self.broker.refusal = reasons.get(state, "the server is stopping")

    # ------------------------------------------------------------- facts

    @property
    def state(self) -> str:
        """One word for health checks."""
        if self.is_draining:
            return "draining"
        assert self.supervisor is not None
        return self.supervisor.state.value

    @property
    def is_serving(self) -> bool:
        """Whether requests are taken."""
        return self.broker.refusal is None

    @property
    def model_name(self) -> str:
        """The name in responses."""
        return model_name_of(self.args)

    def info(self, process: str) -> dict[str, Any]:
        """Return what a process said when it became ready; empty before."""
        assert self.supervisor is not None
        return self.supervisor.processes[process].info

    def load(self) -> dict[str, Any]:
        """Return the scheduler's last heartbeat; empty before the first."""
        assert self.supervisor is not None
        return self.supervisor.processes[links.SCHEDULER].load

    @property
    def vocab_size(self) -> int:
        """Size of the model's vocabulary. Raises RefusedError while no requests are taken."""
        if self.broker.refusal is not None:
            raise RefusedError(self.broker.refusal)
        return int(self.info(links.SCHEDULER)["vocab_size"])

    def public_settings(self) -> dict[str, Any]:
        """Return the settings without secrets."""
        return {
            name: getattr(self.args, name)
            for name in self.args.__struct_fields__
            if name not in SECRET_SETTINGS
        }

    # ------------------------------------------------------------- weights

    async def update_weights(
        self, model_path: str, weight_version: str = "", *, abort_all: bool = False
    ) -> dict[str, Any]:
        """Go on with other weights of the same architecture, and with them after a restart, too.

        Raises OperatingError where they cannot be loaded or do not fit; nothing has changed then.
        """
        if not model_path:
            raise InvalidRequestError("'model_path' must name a directory, a file or a known model")
        if abort_all:
            self.broker.abort_client_rid("", "the weights are being updated")
        asked = {"model_path": model_path, "weight_version": weight_version}
        result: dict[str, Any] = await self.broker.call(
            links.SCHEDULER, "update_weights", asked, UPDATE_TIMEOUT_S
        )
        self.args = msgspec.structs.replace(
            self.args,
            model_path=model_path,
            tokenizer_path=self.args.tokenizer_path or self.args.model_path,
            served_model_name=self.model_name,
            weight_version=result["weight_version"],
        )
        assert self.supervisor is not None
        self.supervisor.use(self.args)
        log.info("weights are those of %s now", model_path)
        return result

    # ------------------------------------------------------------- probing

    async def probe(self) -> None:
        """Generate one token. Probes at the same time share one request, so none pile up.

        Raises OperatingError where the server cannot.
        """
        if self._probe is None or self._probe.done():
            self._probe = asyncio.ensure_future(self._generate_one())
            # Whoever asked may be gone when it fails.
            self._probe.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.shield(self._probe)

    async def _generate_one(self) -> None:
        request = GenerateRequest(
            rid="health",
            sampling=SamplingParams(max_new_tokens=1, temperature=0.0),
            input_ids=pack_ids([0]),
            priority=1,
            arrival=self.clock.wall(),
        )
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                with self.broker.open([request]) as reply:
                    while deltas := await reply.next():
                        finish = deltas[-1][1].finish
                        if finish is not None and finish.kind == "error":
                            raise OperatingError(finish.message)
        except TimeoutError:
            raise RefusedError(f"no token within {PROBE_TIMEOUT_S:g} s") from None
