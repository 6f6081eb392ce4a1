"""Load a server for minutes as many unlike clients would, and see that nothing is lost or leaks.

Every client repeats: a prompt (short or long, often over a prefix that others share, sometimes
with a salt of its own), streaming or not, sampled or greedy, sometimes a client that hangs up,
an abort by id, a bad request, or a batch. What is checked:

    answers     each request ends with exactly one terminal event; greedy answers to a prompt seen
                before are the same text again
    processes   their number is constant; memory, file descriptors and threads do not trend upwards
                (the pools are filled once before, because untouched memory is not resident yet)
    blocks      after the load, with nothing running, flush returns every pool to its first count

The server listens on loopback only and is started for the run; the run is bounded in time. The
exit status is 0 only if every check held.

    usage: python tools/soak.py [--clients 64] [--minutes 5] [--model NAME] [--json FILE] [-- ARGS]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # -P leaves it out

import serving
import wire

REPOSITORY = Path(__file__).resolve().parent.parent
SAMPLE_EVERY_S = 5.0
WARM_UP_SHARE = 0.3  # of the run; growth before it is warming up, not leaking
MAX_NEW_TOKENS = 100
MAX_RSS_GROWTH = 0.05  # of resident memory after warm-up, over the rest of the run
MAX_RSS_GROWTH_BYTES = 64 << 20
REQUEST_TIMEOUT_S = 600.0
MAX_SPECIAL_IDS = 300  # at either end of a vocabulary: most of them mean something special
# Room for about eight long prompts: eviction and preemption happen all the time.
SMALL_POOLS = ("--max-total-tokens", "16384")


@dataclass
class Tally:
    """What the clients saw."""

    outcomes: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    repeats_checked: int = 0

    def problem(self, text: str) -> None:
        """Record what must not happen; the first hundred are kept in words."""
        self.outcomes["problem"] += 1
        if len(self.problems) < 100:
            self.problems.append(text)


@dataclass(frozen=True)
class Sample:
    """What the server's processes held at one time."""

    at_s: float
    figures: serving.ProcessFigures


class Prompts:
    """Where prompts come from: a few long prefixes that everybody shares, and unique tails."""

    def __init__(self, vocab_size: int, max_len: int, seed: int) -> None:
        self._random = random.Random(seed)
        self._vocab_size = vocab_size
        self._max_len = max_len
        lengths = (64, 200, 333, 512, 1024, max_len // 2)
        self._prefixes = [self.ids(min(n, max_len // 2)) for n in lengths]

    def ids(self, length: int) -> list[int]:
        """Return random token ids; the ends of the vocabulary, at most a quarter, are left out."""
        margin = min(MAX_SPECIAL_IDS, self._vocab_size // 4)
        low, high = margin, self._vocab_size - margin
        return [self._random.randrange(low, high) for _ in range(length)]

    def next(self, chance: random.Random) -> list[int]:
        """Return a prompt: usually a shared prefix, or part of one, with a tail."""
        tail = self.ids(chance.choice((1, 2, 15, 16, 17, 40, 120)))
        if chance.random() < 0.25:
            return tail
        prefix = chance.choice(self._prefixes)
        if chance.random() < 0.3:
            prefix = prefix[: chance.randrange(1, len(prefix))]
        return (prefix + tail)[: self._max_len]


class Client:
    """One client: asks, waits, checks, asks again until told to stop."""

    def __init__(self, number: int, to: wire.Address, prompts: Prompts, tally: Tally) -> None:
        self._chance = random.Random(number)
        self._number = number
        self._to = to
        self._prompts = prompts
        self._tally = tally
        self._num_asked = 0
        self._known: list[tuple[list[int], int, str]] = []  # greedy answers to ask for again

    async def run(self, until: float) -> None:
        """Ask until `until` (time.monotonic)."""
        kinds = (self._plain, self._stream, self._repeat, self._hang_up, self._abort,
                 self._bad, self._batch)  # fmt: skip
        weights = (30, 35, 12, 8, 5, 5, 5)
        while time.monotonic() < until:
            [kind] = self._chance.choices(kinds, weights)
            name = kind.__name__.strip("_")
            try:
                await kind()
            except (OSError, EOFError, TimeoutError, ValueError, KeyError) as error:
                self._tally.problem(f"{name}: {type(error).__name__}: {error}")
            else:
                self._tally.outcomes[name] += 1

    def _payload(self, *, stream: bool) -> dict[str, Any]:
        self._num_asked += 1
        sampling: dict[str, Any] = {
            "max_new_tokens": self._chance.choice((1, 4, 16, 48, MAX_NEW_TOKENS)),
            "temperature": self._chance.choice((0.0, 0.0, 0.8, 1.2)),
            "ignore_eos": self._chance.random() < 0.5,
        }
        if sampling["temperature"]:
            sampling |= {"top_p": 0.9, "sampling_seed": self._num_asked}
        payload = {
            "input_ids": self._prompts.next(self._chance),
            "sampling_params": sampling,
            "stream": stream,
            "rid": f"soak-{self._number}-{self._num_asked}",
        }
        if self._chance.random() < 0.1:
            payload["cache_salt"] = f"tenant-{self._number % 3}"
        return payload

    async def _ask(self, payload: object, **options: Any) -> wire.Reply:
        options.setdefault("timeout_s", REQUEST_TIMEOUT_S)
        return await wire.call(self._to, "POST", "/generate", payload, **options)

    def _account(self, answer: dict[str, Any]) -> None:
        meta = answer["meta_info"]
        if meta["finish_reason"]["type"] not in ("stop", "length"):
            self._tally.problem(f"finish_reason {meta['finish_reason']}")
        self._tally.prompt_tokens += meta["prompt_tokens"]
        self._tally.cached_tokens += meta["cached_tokens"]
        self._tally.generated_tokens += meta["completion_tokens"]

    async def _plain(self) -> None:
        payload = self._payload(stream=False)
        reply = await self._ask(payload)
        if reply.status != 200:
            self._tally.problem(f"plain: status {reply.status} {reply.body[:200]!r}")
            return
        answer = reply.json()
        self._account(answer)
        sampling = payload["sampling_params"]
        if not sampling["temperature"] and len(self._known) < 8:
            self._known.append((payload["input_ids"], sampling, answer["text"]))

    async def _stream(self) -> None:
        reply = await self._ask(self._payload(stream=True))
        if reply.status != 200:
            self._tally.problem(f"stream: status {reply.status} {reply.body[:200]!r}")
            return
        payloads = [data for _at, data in reply.events]
        if payloads.count(b"[DONE]") != 1 or payloads[-1] != b"[DONE]":
            self._tally.problem(f"stream: {payloads.count(b'[DONE]')} closing marks")
        ends = [e for d in payloads[:-1] if (e := json.loads(d))["meta_info"]["finish_reason"]]
        if len(ends) != 1:
            self._tally.problem(f"stream: {len(ends)} terminal events")
        self._account(reply.last_event)

    async def _repeat(self) -> None:
        """Ask a greedy prompt again: the answer may not depend on what was cached since."""
        if not self._known:
            return
        ids, sampling, text = self._chance.choice(self._known)
        reply = await self._ask({"input_ids": ids, "sampling_params": sampling})
        if reply.status != 200:
            self._tally.problem(f"repeat: status {reply.status} {reply.body[:200]!r}")
            return
        self._tally.repeats_checked += 1
        if reply.json()["text"] != text:
            self._tally.outcomes["repeat_differs"] += 1

    async def _hang_up(self) -> None:
        await self._ask(self._payload(stream=True), hang_up_after=self._chance.choice((1, 2, 5)))

    async def _abort(self) -> None:
        payload = self._payload(stream=False)
        payload["sampling_params"]["max_new_tokens"] = 100
        asking = asyncio.create_task(self._ask(payload))
        await asyncio.sleep(self._chance.random() * 0.5)
        await wire.call(self._to, "POST", "/abort_request", {"rid": payload["rid"]})
        reply = await asking
        if reply.status == 200:
            reason = reply.json()["meta_info"]["finish_reason"]["type"]
            if reason not in ("abort", "stop", "length"):
                self._tally.problem(f"abort: finish_reason {reason}")
        elif reply.status not in (400, 499, 503):
            self._tally.problem(f"abort: status {reply.status} {reply.body[:200]!r}")

    async def _bad(self) -> None:
        bad: dict[str, Any] = self._chance.choice(
            (
                {"input_ids": []},
                {"input_ids": [-1, 5]},
                {"input_ids": [1 << 30]},
                {"input_ids": [5], "sampling_params": {"temperature": -1}},
                {"text": "a", "input_ids": [5]},
                {},
            )
        )
        reply = await self._ask(bad)
        if reply.status != 400 or not reply.json()["error"]["message"]:
            self._tally.problem(f"bad request {bad}: status {reply.status}")

    async def _batch(self) -> None:
        prompts = [self._prompts.next(self._chance) for _ in range(self._chance.choice((2, 3, 5)))]
        sampling = {"max_new_tokens": 8, "temperature": 0}
        reply = await self._ask({"input_ids": prompts, "sampling_params": sampling})
        if reply.status != 200 or len(reply.json()) != len(prompts):
            self._tally.problem(f"batch: status {reply.status} {reply.body[:200]!r}")
            return
        for answer in reply.json():
            self._account(answer)


async def watch(server: serving.Server, until: float, tally: Tally) -> list[Sample]:
    """Sample the server's processes and print progress until the time is over."""
    start = time.monotonic()
    samples: list[Sample] = []
    while time.monotonic() < until:
        await asyncio.sleep(SAMPLE_EVERY_S)
        figures = server.figures()
        samples.append(Sample(time.monotonic() - start, figures))
        asked = sum(tally.outcomes.values())
        print(
            f"{samples[-1].at_s:6.0f} s  {asked} requests, {tally.generated_tokens} tokens, "
            f"{tally.outcomes['problem']} problems, {figures.num_processes} processes, "
            f"{figures.num_fds} fds, {figures.rss_bytes >> 20} MiB",
            flush=True,
        )
    return samples


def _find(info: Any, key: str) -> Any:
    """Find the first value of `key` at any depth; None where there is none."""
    if isinstance(info, dict):
        if key in info:
            return info[key]
        info = list(info.values())
    parts = info if isinstance(info, list) else ()
    return next((found for part in parts if (found := _find(part, key)) is not None), None)


def pools_of(info: Any) -> dict[str, dict[str, int]]:
    """Return each pool's blocks by place, without what only counts up."""
    pools = _find(info, "pools")
    assert pools, "the server's description has no pools"
    return {
        name: {place: n for place, n in counts.items() if place != "evicted"}
        for name, counts in pools.items()
    }


def leak_problems(samples: list[Sample]) -> list[str]:
    """Compare what was held after warming up with what was held at the end."""
    warm = [s for s in samples if s.at_s >= samples[-1].at_s * WARM_UP_SHARE]
    if len(warm) < 4:
        return []
    third = max(len(warm) // 3, 1)
    first, last = warm[:third], warm[-third:]

    def peak(part: list[Sample], name: str) -> int:
        return max(int(getattr(s.figures, name)) for s in part)

    problems = []
    counts = {s.figures.num_processes for s in warm}
    if len(counts) > 1:
        problems.append(f"the number of processes changed: {sorted(counts)}")
    before, after = peak(first, "rss_bytes"), peak(last, "rss_bytes")
    if after - before > max(before * MAX_RSS_GROWTH, MAX_RSS_GROWTH_BYTES):
        problems.append(f"resident memory grew from {before >> 20} to {after >> 20} MiB")
    for name, slack in (("num_fds", 16), ("num_threads", 4)):
        if peak(last, name) > peak(first, name) + slack:
            problems.append(f"{name} grew from {peak(first, name)} to {peak(last, name)}")
    return problems


async def fill_pools(server: serving.Server, prompts: Prompts, length: int) -> None:
    """Ask new prompts until every pool has run full, so that all of its memory is resident."""
    info = await server.info()
    pools, page_tokens = pools_of(info), _find(info, "page_size")
    largest = max(sum(counts.values()) for counts in pools.values())
    for _ in range(2 * largest * page_tokens // length + 1):
        if not any(counts["free"] for counts in pools.values()):
            break
        payload = {"input_ids": prompts.ids(length), "sampling_params": {"max_new_tokens": 1}}
        await server.generate(payload)
        pools = pools_of(await server.info())
    await server.flush()


async def quiesce(server: serving.Server) -> dict[str, Any]:
    """Wait until nothing runs, flush, and return the server's description."""
    info: dict[str, Any] = {}
    for _ in range(120):
        info = await server.info()
        if _find(info, "num_open") == 0:
            break
        await asyncio.sleep(0.5)
    await server.flush()
    return await server.info()


async def soak(server: serving.Server, args: argparse.Namespace) -> dict[str, Any]:
    """Run the load and return the result."""
    tally = Tally()
    info = await server.info()
    longest = min(args.max_prompt_len, _find(info, "max_sequence_len") - MAX_NEW_TOKENS)
    prompts = Prompts(_find(info, "vocab_size"), longest, args.seed)
    print("filling the pools", flush=True)
    await fill_pools(server, prompts, longest)
    pools_before = pools_of(await server.info())
    until = time.monotonic() + args.minutes * 60
    clients = [Client(i, server.address, prompts, tally) for i in range(args.clients)]
    watching = asyncio.create_task(watch(server, until, tally))
    await asyncio.gather(*(client.run(until) for client in clients))
    samples = await watching
    info = await quiesce(server)
    problems = tally.problems + leak_problems(samples)
    if pools_before != pools_of(info):
        problems.append(f"pools before {pools_before} and after the flush {pools_of(info)}")
    if tally.outcomes["repeat_differs"] and args.exact:
        problems.append(f"{tally.outcomes['repeat_differs']} greedy answers differed when repeated")
    return {
        "clients": args.clients,
        "minutes": args.minutes,
        "outcomes": dict(tally.outcomes),
        "prompt_tokens": tally.prompt_tokens,
        "cached_tokens": tally.cached_tokens,
        "generated_tokens": tally.generated_tokens,
        "repeats_checked": tally.repeats_checked,
        "problems": problems,
        "samples": [{"at_s": s.at_s} | asdict(s.figures) for s in samples],
        "pools": pools_of(info),
    }


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """Read the command line; what follows `--` goes to the server."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-prompt-len", type=int, default=2048)
    parser.add_argument(
        "--exact", action="store_true",
        help="repeated greedy answers must be equal: for a server in the deterministic mode",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, default=REPOSITORY / "results" / "soak.json")
    parser.add_argument("server_arguments", nargs="*", help="after --: the server's, instead")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    """Soak, write the result, print the verdict."""
    args = parse_arguments(argv)
    environment = serving.environment()
    log = REPOSITORY / "results" / "soak.log"
    server_arguments = args.server_arguments or list(SMALL_POOLS)
    server = serving.Server(args.model, *server_arguments, log=log)
    with server:
        result = asyncio.run(soak(server, args))
        killed = server.stop()
    if killed:
        result["problems"].append(f"did not end when interrupted: {killed}")
    document = {
        "tool": "soak",
        "model": args.model,
        "server_arguments": server_arguments,
        "environment": environment,
        **result,
    }
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    for problem in result["problems"]:
        print(f"problem: {problem}")
    print(f"{sum(result['outcomes'].values())} requests: {result['outcomes']}")
    print(f"{len(result['problems'])} problems; written: {args.json}")
    return 1 if result["problems"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
