"""The tree against dictionaries, under any sequence of operations, for every kind of group."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from statewise.radix import Namespace
from support.radix_oracle import SCHEMAS, Harness, Request

NAMESPACES = [Namespace(), Namespace("a"), Namespace("", "a")]
# Few distinct tokens and long runs of one token: prefixes are shared and diverge anywhere.
TOKENS = st.lists(st.tuples(st.integers(0, 1), st.integers(1, 9)), min_size=1, max_size=6).map(
    lambda runs: [token for token, count in runs for _ in range(count)]
)


class TreeMachine(RuleBasedStateMachine):
    """Requests that share prefixes come, compute, publish, keep, finish; others evict and drop."""

    schema_name = "full"
    policy = "value"

    def __init__(self) -> None:
        super().__init__()
        self.harness = Harness(SCHEMAS[self.schema_name], self.policy)

    def pick(self, data: st.DataObject) -> Request:
        return data.draw(st.sampled_from(self.harness.requests))

    def known(self, data: st.DataObject) -> tuple[Namespace, list[int]]:
        return data.draw(st.sampled_from(sorted(self.harness.keys.values(), key=repr)))

    @precondition(lambda self: len(self.harness.requests) < 4)
    @rule(namespace=st.sampled_from(NAMESPACES), tokens=TOKENS, back_off=st.integers(0, 2))
    def start(self, namespace: Namespace, tokens: list[int], back_off: int) -> None:
        self.harness.start(namespace, tokens, back_off)

    @precondition(lambda self: self.harness.keys and len(self.harness.requests) < 4)
    @rule(data=st.data(), more=TOKENS, cut=st.integers(0, 5))
    def start_known(self, data: st.DataObject, more: list[int], cut: int) -> None:
        namespace, tokens = self.known(data)
        self.harness.start(namespace, tokens[: len(tokens) - cut] + more)

    @precondition(lambda self: self.harness.requests)
    @rule(data=st.data(), num_tokens=st.integers(1, 12))
    def compute(self, data: st.DataObject, num_tokens: int) -> None:
        self.harness.compute(self.pick(data), num_tokens)

    @precondition(lambda self: self.harness.requests)
    @rule(data=st.data())
    def run_to_end(self, data: st.DataObject) -> None:
        request = self.pick(data)
        self.harness.compute(request, len(request.tokens))

    @precondition(lambda self: self.harness.requests)
    @rule(data=st.data(), back=st.integers(0, 3))
    def keep(self, data: st.DataObject, back: int) -> None:
        request = self.pick(data)
        published = request.lease.num_published_pages * self.harness.size
        position = max(0, min(request.position, published) - back)
        kept = self.harness.tree.keep(request.lease, position)
        boundary = position // self.harness.size * self.harness.size
        windows = [g for g, s in enumerate(self.harness.schema.groups) if s.kind.is_window]
        if kept and request.stamps == self.harness.tree.stamps:
            for g in windows:
                assert self.harness.can_resume(request.namespace, request.tokens, g, boundary)

    @precondition(lambda self: self.harness.requests)
    @rule(data=st.data())
    def snapshot(self, data: st.DataObject) -> None:
        self.harness.snapshot(self.pick(data))

    @precondition(lambda self: self.harness.requests)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.harness.finish(self.pick(data))

    @rule(data=st.data(), num_blocks=st.integers(1, 6))
    def evict(self, data: st.DataObject, num_blocks: int) -> None:
        group = data.draw(st.integers(0, self.harness.schema.num_groups - 1))
        self.harness.evict(group, num_blocks)

    @precondition(lambda self: self.harness.keys)
    @rule(data=st.data(), page=st.integers(0, 12))
    def drop(self, data: st.DataObject, page: int) -> None:
        namespace, tokens = self.known(data)
        group = data.draw(st.integers(0, self.harness.schema.num_groups - 1))
        self.harness.drop(namespace, tokens, group, min(page, len(tokens) // self.harness.size))

    @rule()
    def flush(self) -> None:
        self.harness.take_back(self.harness.tree.flush())

    @rule(stamp=st.integers(0, 1))
    def new_stamps(self, stamp: int) -> None:
        self.harness.tree.expect([stamp] * self.harness.schema.num_groups)

    @invariant()
    def consistent(self) -> None:
        self.harness.check()

    @invariant()
    def matches(self) -> None:
        for namespace, tokens in list(self.harness.keys.values())[-3:]:
            self.harness.check_match(namespace, tokens)
            self.harness.check_match(namespace, [*tokens, 1, 0, 1])

    def teardown(self) -> None:
        for namespace, tokens in self.harness.keys.values():
            self.harness.check_match(namespace, tokens)
        self.harness.drain()


@pytest.mark.slow
@pytest.mark.parametrize("schema_name", SCHEMAS)
def test_tree_equals_dictionaries(schema_name: str) -> None:
    machine = type("Machine", (TreeMachine,), {"schema_name": schema_name})
    run = settings(max_examples=20, stateful_step_count=30, deadline=None)
    machine.TestCase.settings = run
    machine.TestCase().runTest()


@pytest.mark.parametrize("policy", ["recency", "lru"])
def test_no_policy_loses_or_keeps_what_it_must_not(policy: str) -> None:
    parts = {"schema_name": "full_window", "policy": policy}
    machine = type("Machine", (TreeMachine,), parts)
    machine.TestCase.settings = settings(max_examples=8, stateful_step_count=30, deadline=None)
    machine.TestCase().runTest()
