"""TopK against NumPy."""

import numpy as np
import pytest

from jaxdp.compression import TopK
from tests.compression_helpers import gradients, run, sent_bytes


@pytest.mark.parametrize("devices", [2, 3], ids="n{}".format)
def test_the_largest_numbers_of_every_replica_are_added_up(devices):
    """Stich et al., algorithm 1, with a memory for each replica."""
    steps = [gradients(devices, step, [(6, 5), (1,)]) for step in range(4)]
    found = run(TopK(0.1), steps)
    for i, count in enumerate((3, 1)):
        memory = np.zeros_like(steps[0][i])
        for step, leaves in enumerate(steps):
            total = np.zeros_like(memory[0])
            for rank in range(devices):
                memory[rank] += leaves[i][rank]
                flat = memory[rank].reshape(-1)
                chosen = np.argsort(-np.abs(flat))[:count]
                np.add.at(total.reshape(-1), chosen, flat[chosen])
                flat[chosen] = 0
            mean = total / np.float32(devices)
            np.testing.assert_allclose(found.means[step][i][0], mean, rtol=1e-6)
            np.testing.assert_allclose(found.residuals[step][i], memory, atol=1e-6)


@pytest.mark.parametrize(
    ("ratio", "numbers"), [(1e-9, 1), (0.01, 1), (0.5, 15), (0.51, 16), (1.0, 30)]
)
def test_numbers_and_their_places_on_the_wire(ratio, numbers):
    """At least one number of a leaf travels, and its place; to all others."""
    leaves = gradients(3, shapes=[(6, 5)])
    assert sent_bytes(TopK(ratio), leaves) == 2 * 8 * numbers


def test_without_error_feedback_small_numbers_never_travel():
    leaves = [np.array([[1.0, 4.0], [2.0, 8.0]], "f")]
    found = run(TopK(0.5, error_feedback=False), [leaves] * 3)
    for ends in found.means:
        assert ends[0].tolist() == [[0, 6]] * 2
