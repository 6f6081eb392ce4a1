"""A two-minute tour of prefix reuse in a hybrid model, told turn by turn.

Gemma 3 270M keeps two kinds of history: its global layers every token, its sliding-window layers
the last 512. The tour runs prompt programs over one shared document and shows, for each turn, what
matched, what was reused as it stood, what set the limit, and how long the first token took:

    1  a question about a document nobody asked about before: everything is computed
    2  another question about it: the document is reused whole
    3  a conversation that goes on: each turn reuses all before it
    4  three branches from one point, at the same time: the common part is computed once
    5  half of the document, then other text: the history is there, the window at that point is
       not. Matched tokens are not reused tokens
    6  the same again: the cache kept the window at the branch point, and now it is

The server gets a small pool for windows, so that they move on as they do where many people share
one: with room for every window ever written, step 5 would be a full hit, too. The figures go to the
terminal as text, and to a picture where matplotlib is installed. The server is started for the tour
and ends with it.

    usage: python tools/demo.py [--model gemma3-270m] [--picture FILE.svg|FILE.png] [-- ARGS...]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # -P leaves it out

import serving
import statewise as sw

REPOSITORY = Path(__file__).resolve().parent.parent
MAX_ANSWER_TOKENS = 24
# History for 16k tokens, windows for 1.5k: about three requests' worth.
SMALL_POOLS = ("--max-total-tokens", "16384", "--max-window-tokens", "1536",
               "--chunked-prefill-size", "256")  # fmt: skip

PORTS = ("Aldersund", "Brackwater", "Corran Ferry", "Duneholm", "Eiderness", "Farlight")
GOODS = ("barley", "slate", "wool", "salt cod", "pitch", "cider", "copper", "rope")


def document(num_entries: int) -> str:
    """Return a pilot's almanac of that many entries, about 60 tokens each."""
    lines = ["The Pilot's Almanac of the Northern Coast\n"]
    for day in range(1, num_entries + 1):
        port, next_port = PORTS[day % len(PORTS)], PORTS[(day * 5 + 1) % len(PORTS)]
        goods = GOODS[day * 3 % len(GOODS)]
        lines.append(
            f"Day {day}. High water at {port} comes at {day % 12 + 1} hours and "
            f"{day * 7 % 60} minutes. Ships bound for {next_port} carry {goods} and should keep "
            f"{day % 4 + 2} fathoms under the keel until the light bears north.\n"
        )
    return "".join(lines)


@sw.function
def ask(s: Any, text: str, question: str) -> None:
    """One question under a document."""
    s += text + f"\nQuestion: {question}\nAnswer:"
    s += sw.gen("answer", max_tokens=MAX_ANSWER_TOKENS, stop="\n", temperature=0)


@sw.function
def converse(s: Any, text: str, questions: list[str]) -> None:
    """Several questions, each after the answers before it."""
    s += text
    for number, question in enumerate(questions):
        s += f"\nQuestion: {question}\nAnswer:"
        s += sw.gen(f"answer{number}", max_tokens=MAX_ANSWER_TOKENS, stop="\n", temperature=0)


@sw.function
def branch(s: Any, text: str, questions: list[str]) -> None:
    """Several questions at the same time, from one point."""
    s += text + "\nNotes of three pilots follow.\n"
    forks = s.fork(len(questions))
    for fork, question in zip(forks, questions, strict=True):
        fork += f"\nQuestion: {question}\nAnswer:"
        fork += sw.gen("answer", max_tokens=MAX_ANSWER_TOKENS, stop="\n", temperature=0)
    forks.join()


@dataclass(frozen=True)
class Turn:
    """What one call cost: tokens of its prompt by fate, and milliseconds to the first token."""

    title: str
    prompt: int
    matched: int
    reused: int
    limiting_group: str
    reason: str
    ttft_ms: float
    answer: str

    @property
    def computed(self) -> int:
        """Prompt tokens that were computed, matched or not."""
        return self.prompt - self.reused


def turn_of(title: str, meta: dict[str, Any], ttft_ms: float, answer: str) -> Turn:
    """Read a call's figures from its `meta_info`."""
    report = meta.get("cache_report") or {}
    return Turn(
        title,
        prompt=meta["prompt_tokens"],
        matched=report.get("matched", 0),
        reused=report.get("reused", 0),
        limiting_group=report.get("limiting_group", ""),
        reason=report.get("reason", ""),
        ttft_ms=ttft_ms,
        answer=" ".join(answer.split()),
    )


class Tour:
    """Runs the programs against one server and collects turns."""

    def __init__(self, backend: Any, text: str, say: Callable[[str], None]) -> None:
        self.backend = backend
        self.text = text
        self.turns: list[Turn] = []
        self._say = say

    def _add(self, turn: Turn) -> None:
        self.turns.append(turn)
        self._say(
            f"    prompt {turn.prompt:5}   matched {turn.matched:5}   reused {turn.reused:5}   "
            f"computed {turn.computed:5}   first token {turn.ttft_ms:7.0f} ms"
            + (f"   limited by {turn.limiting_group}" if turn.limiting_group else "")
        )
        if turn.reason:
            self._say(f"    {turn.reason}")

    def one(self, title: str, text: str, question: str) -> None:
        """Ask one question, streaming, and time its first piece of text."""
        self._say(f"\n{len(self.turns) + 1}  {title}\n    Q: {question}")
        start = time.perf_counter()
        state = ask.run(text=text, question=question, backend=self.backend, stream=True)
        first = 0.0
        for _piece in state.text_iter("answer"):
            first = first or (time.perf_counter() - start) * 1e3
        state.sync()
        answer = str(state["answer"])
        self._say(f"    A: {answer.strip()}")
        self._add(turn_of(title, state.get_meta_info("answer"), first, answer))

    def conversation(self, questions: list[str]) -> None:
        """Run a program of several turns; the first token's time is the server's own."""
        self._say("\n   A conversation: every turn continues the one before it")
        state = converse.run(text=self.text, questions=questions, backend=self.backend)
        for number, question in enumerate(questions):
            answer = str(state[f"answer{number}"])
            self._say(f"    Q: {question}\n    A: {answer.strip()}")
            meta = state.get_meta_info(f"answer{number}")
            self._add(
                turn_of(f"conversation, turn {number + 1}", meta, first_token_ms(meta), answer)
            )

    def branches(self, questions: list[str]) -> None:
        """Three branches of one state."""
        self._say("\n   Three branches from one point, at the same time")
        state = branch.run(text=self.text, questions=questions, backend=self.backend)
        state.sync()
        answers = state["answer"]
        metas = state.get_meta_info("answer")
        for number, (question, answer) in enumerate(zip(questions, answers, strict=True)):
            self._say(f"    Q: {question}\n    A: {str(answer).strip()}")
            meta = metas[number]
            self._add(turn_of(f"branch {number + 1} of 3", meta, first_token_ms(meta), str(answer)))


def first_token_ms(meta: dict[str, Any]) -> float:
    """Milliseconds until the first token as the server counted them: waiting and prefill."""
    parts = [meta.get("queue_time"), meta.get("prefill_time")]
    if all(isinstance(p, int | float) for p in parts):
        return 1e3 * sum(float(p) for p in parts if p is not None)
    return 1e3 * float(meta.get("e2e_latency", 0.0))


def run_tour(backend: Any, num_entries: int, say: Callable[[str], None]) -> list[Turn]:
    """All turns, in order."""
    text = document(num_entries)
    tour = Tour(backend, text, say)
    ask.run(text="Warm up.", question="Ready?", backend=backend).sync()
    tour.one(
        "a new document: everything is computed", text, "What do ships bound for Duneholm carry?"
    )
    tour.one("another question: the document is reused", text, "When is high water at Farlight?")
    tour.conversation(["Which port is first?", "And which one is next?"])
    tour.branches(["Who carries wool?", "Who carries slate?", "Who carries rope?"])
    half = text[: text.index(f"Day {num_entries // 2}.")]
    other = half + "The almanac of this year ends here, for the printer's house burned down.\n"
    tour.one("half of the document, then other text", other, "Why does the almanac end?")
    tour.one("the same half again", half + "The rest is lost.\n", "What is lost?")
    return tour.turns


def summary(turns: list[Turn]) -> str:
    """Compare the first two turns: the same document, new and known."""
    cold, hit = turns[0], turns[1]
    return (
        f"\nThe same {hit.reused} tokens of state: first token after {cold.ttft_ms:.0f} ms new, "
        f"{hit.ttft_ms:.0f} ms reused ({cold.ttft_ms / max(hit.ttft_ms, 1e-9):.0f} times faster)."
    )


def draw(turns: list[Turn], target: Path) -> bool:
    """Draw tokens by fate and time to the first token; False where matplotlib is missing."""
    try:
        import matplotlib as mpl
    except ImportError:
        return False
    mpl.use("Agg")
    import matplotlib.pyplot as plt

    labels = [f"{i}. {t.title.split(':')[0]}" for i, t in enumerate(turns, 1)]
    places = list(range(len(turns)))
    figure, (tokens, times) = plt.subplots(1, 2, figsize=(11, 0.5 * len(turns) + 1.6), sharey=True)
    reused = [t.reused for t in turns]
    matched = [max(t.matched - t.reused, 0) for t in turns]
    fresh = [t.prompt - max(t.matched, t.reused) for t in turns]
    tokens.barh(places, reused, color="#2a7f62", label="reused as it stood")
    tokens.barh(places, matched, left=reused, color="#e0a030", label="matched, computed again")
    below = [a + b for a, b in zip(reused, matched, strict=True)]
    tokens.barh(places, fresh, left=below, color="#b8c0c8", label="new, computed")
    tokens.set_yticks(places, labels)
    tokens.invert_yaxis()
    tokens.set_xlabel("tokens of the prompt")
    tokens.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=3, frameon=False)
    bars = times.barh(places, [t.ttft_ms for t in turns], color="#44607c")
    times.bar_label(bars, [f"{t.ttft_ms:.0f}" for t in turns], padding=3)
    times.set_xlabel("milliseconds to the first token")
    times.margins(x=0.12)
    for axes in (tokens, times):
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=130, bbox_inches="tight")
    plt.close(figure)
    return True


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """Read the command line; what follows `--` goes to the server."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--model", default="gemma3-270m")
    parser.add_argument("--entries", type=int, default=48, help="length of the document")
    parser.add_argument("--picture", type=Path, default=REPOSITORY / "results" / "demo.svg")
    parser.add_argument("server_arguments", nargs="*", help="after --: the server's, instead")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    """Start a server, take the tour, draw it."""
    args = parse_arguments(argv)
    log = REPOSITORY / "results" / "demo-server.log"
    print(f"Starting a server with {args.model} (log: {log})", flush=True)
    with serving.Server(args.model, *(args.server_arguments or SMALL_POOLS), log=log) as server:
        print(f"Ready after {server.start_s:.1f} s at {server.address.url}", flush=True)
        backend = sw.RuntimeEndpoint(server.address.url)
        turns = run_tour(backend, args.entries, lambda line: print(line, flush=True))
    print(summary(turns))
    if draw(turns, args.picture):
        print(f"Picture: {args.picture}")
    else:
        print("No picture: matplotlib is not installed (pip install 'statewise[dev]')")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
