"""What both libraries train to see what distributing costs: sizes and batches.

Only NumPy here, because a process loads one of the two libraries.
"""

import numpy as np

LOCAL_ROWS = {"cnn": 32, "transformer": 16}  # of one process
# So small that the same rows, seen thousands of times, are not learnt by heart:
# gradients that vanish become subnormal numbers, which are slow.
LEARNING_RATE, MOMENTUM = 1e-5, 0.9
CONTEXT, CHARACTERS = 32, 128


def local_batch(model: str, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """The rows of one process.

    Args:
        model: "cnn" or "transformer".
        rank: Of the process.

    Returns:
        Images `[32, 8, 8, 1]` and labels `[32]`, or characters `[16, 32]` and those
        that follow, `[16, 32]`.
    """
    random, rows = np.random.default_rng(rank), LOCAL_ROWS[model]
    if model == "cnn":
        images = random.normal(size=(rows, 8, 8, 1)).astype(np.float32)
        return images, random.integers(0, 10, rows).astype(np.int32)
    text = random.integers(0, CHARACTERS, (rows, CONTEXT + 1)).astype(np.int32)
    return text[:, :-1], text[:, 1:]
