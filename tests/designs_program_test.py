"""What the compiled step of every design sends, and where its optimizer runs."""

import functools

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxdp
from jaxdp.program import hlo
from tests import contract
from tests.contract import BATCHES, DESIGNS, PARAMS

# Bytes of the leaves that travel, in the order of the tree: bias, kernel, output, scale
# (an empty leaf and None send nothing), and the loss.
LEAVES = [3 * 4, 15 * 4, 21 * 4, 4]
LOSS = 4
BUCKETS = [[LOSS], [84], [4, 12], [60]]  # of at most 64 bytes, in order of use


@functools.cache
def compiled(design, devices):
    train = jaxdp.data_parallel(
        contract.loss_fn,
        optax.adam(0.01),
        jaxdp.data_mesh(devices),
        DESIGNS[design](devices),
    )
    return train.lower(train.init(PARAMS), BATCHES[0]).compile()


def text_of(design):
    text = compiled(design, 3).as_text()
    assert text is not None
    return text


def ring_bytes(nbytes, devices):
    """Of one float32 buffer in 2 (N - 1) rounds of chunks of whole elements."""
    return 2 * (devices - 1) * -(-nbytes // (4 * devices)) * 4


def test_ring_sends_one_bucket_in_2_n_minus_1_permutes(mesh):
    report = jaxdp.analyze(compiled("ring", mesh.size))
    each = ring_bytes(sum(LEAVES) + LOSS, mesh.size)
    assert report.sent_bytes == report.received_bytes == (each,) * mesh.size
    assert report.count("collective-permute") == 2 * (mesh.size - 1)
    assert len(report.collectives) == 2 * (mesh.size - 1)  # and nothing else


def test_ring_sends_every_bucket_by_itself(mesh):
    report = jaxdp.analyze(compiled("ring-buckets", mesh.size))
    each = sum(ring_bytes(sum(bucket), mesh.size) for bucket in BUCKETS)
    assert report.sent_bytes == report.received_bytes == (each,) * mesh.size
    assert report.count("collective-permute") == 2 * (mesh.size - 1) * len(BUCKETS)
    assert len(report.collectives) == 2 * (mesh.size - 1) * len(BUCKETS)


@pytest.mark.parametrize("design", ["root-first", "root-last"])
def test_all_traffic_passes_through_the_root(design, mesh):
    report = jaxdp.analyze(compiled(design, mesh.size))
    devices, root = mesh.size, mesh.size - 1 if design == "root-last" else 0
    each = sum(LEAVES) + LOSS  # gradients one way, parameters the other; loss both ways
    expected = [each] * devices
    expected[root] = (devices - 1) * each
    assert report.sent_bytes == report.received_bytes == tuple(expected)
    assert all(root in link for link in report.link_bytes)
    assert report.count("collective-permute") == 2 * (devices - 1)
    assert len(report.collectives) == 2 * (devices - 1)


def test_native_is_left_to_xla(mesh):
    report = jaxdp.analyze(compiled("native", mesh.size))
    # XLA reduces every leaf with chunks of its own.
    each = sum(ring_bytes(nbytes, mesh.size) for nbytes in [*LEAVES, LOSS])
    assert report.sent_bytes == report.received_bytes == (each,) * mesh.size
    assert {op.kind for op in report.collectives} == {"all-reduce"}


def reachable(module, names):
    """All computations that these call, and they themselves."""
    found, pending = set(), list(names)
    while pending:
        name = pending.pop()
        if name not in found:
            found.add(name)
            pending += called(module, name)
    return found


def called(module, name):
    """The computations that the instructions of one name."""
    attributes = ("calls", "to_apply", "body", "condition", "branch_computations")
    return [
        part.strip(" {}%")
        for instruction in module.computations[name].values()
        for attribute in attributes
        for part in instruction.attributes.get(attribute, "").split(",")
        if part
    ]


@pytest.mark.parametrize("design", ["root-first", "root-last"])
def test_the_optimizer_stands_in_one_branch_only(design):
    """Adam is the only part of the step that takes a square root."""
    module = hlo.parse(text_of(design))
    roots = {
        name
        for name, computation in module.computations.items()
        if any(i.opcode in ("sqrt", "rsqrt", "power") for i in computation.values())
    }
    (conditional,) = [
        instruction
        for computation in module.computations.values()
        for instruction in computation.values()
        if instruction.opcode == "conditional"
    ]
    branches = [
        reachable(module, [name.strip(" {}%")])
        for name in conditional.attributes["branch_computations"].split(",")
    ]
    without = reachable(module, [module.entry]) - set().union(*branches)
    assert roots
    assert not roots & without
    assert sorted(bool(roots & branch) for branch in branches) == [False, True]


@pytest.mark.parametrize("design", ["ring", "native"])
def test_the_optimizer_of_an_all_reduce_runs_everywhere(design):
    opcodes = [
        instruction.opcode
        for computation in hlo.parse(text_of(design)).computations.values()
        for instruction in computation.values()
    ]
    assert "sqrt" in opcodes
    assert "conditional" not in opcodes


@pytest.mark.parametrize("root", [0, 1, 2])
def test_only_the_root_keeps_an_optimizer_state(root):
    mesh = jaxdp.data_mesh(3)
    train = jaxdp.data_parallel(
        contract.loss_fn, optax.adam(0.01), mesh, jaxdp.GatherToRoot(root=root)
    )
    state = train.init(PARAMS)
    assert jax.tree.leaves(state.opt_state)[0].sharding.spec == P("data")
    initial = jax.tree.map(np.asarray, state.opt_state)
    for batch in BATCHES[:2]:
        state, _ = train.step(state, batch)
    for leaf, before in zip(
        jax.tree.leaves(state.opt_state), jax.tree.leaves(initial), strict=True
    ):
        for rank in {0, 1, 2} - {root}:
            np.testing.assert_array_equal(leaf[rank], before[rank])
        assert not leaf.size or (np.asarray(leaf[root]) != before[root]).any()


@pytest.mark.parametrize("design", DESIGNS)
def test_the_state_is_updated_in_place(design):
    """Donation: every buffer of the state is one of the results as well."""
    header = text_of(design).splitlines()[0]
    train = jaxdp.data_parallel(
        contract.loss_fn, optax.adam(0.01), jaxdp.data_mesh(3), DESIGNS[design](3)
    )
    assert header.count("may-alias") == len(jax.tree.leaves(train.init(PARAMS)))
