"""A character transformer in plain JAX, in parts, with 16 bits, layers in a scan.

    python docs/examples/char_transformer.py  # GPUs, or 8 CPU devices
    python -m jaxdp.launch -n 2 docs/examples/char_transformer.py  # two processes

It reads what `help("for")` prints: half a million characters that come with Python.
`Zero(stage=3)` keeps parameters, gradients and optimizer state in parts, one per
device. The blocks are stacked, and `jaxdp.scan_layers` gathers one at a time. The loss
computes in bfloat16, and that is what travels of the parameters; the optimizer has
float32.
"""

import itertools
import os
import pydoc_data.topics

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxdp

CHARACTERS, CONTEXT = 128, 32  # ASCII codes, and how many of them are seen
WIDTH, HEADS, BLOCKS = 64, 4, 3


def init(key, width=WIDTH, blocks=BLOCKS):
    """Parameters; those of the blocks are stacked, `[blocks, ...]`."""
    keys = iter(jax.random.split(key, 6))

    def normal(*shape, fan_in):
        return jax.random.normal(next(keys), shape) / fan_in**0.5

    return {
        "characters": normal(CHARACTERS, width, fan_in=width),
        "places": normal(CONTEXT, width, fan_in=width),
        "blocks": {
            "scale1": jnp.ones((blocks, width)),
            "qkv": normal(blocks, width, 3 * width, fan_in=width),
            "mix": normal(blocks, width, width, fan_in=blocks * width),
            "scale2": jnp.ones((blocks, width)),
            "hidden": normal(blocks, width, 4 * width, fan_in=width),
            "out": normal(blocks, 4 * width, width, fan_in=4 * blocks * width),
        },
        "scale": jnp.ones(width),
    }


def normalized(x, scale):
    """RMSNorm, in float32: Zhang and Sennrich, NeurIPS 2019."""
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(wide**2, axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(mean_square + 1e-6)).astype(x.dtype) * scale


def block(params, x):
    """Attention to characters before, then two dense layers: `[rows, T, width]`."""
    rows, time, width = x.shape
    qkv = normalized(x, params["scale1"]) @ params["qkv"]
    q, k, v = jnp.split(qkv.reshape(rows, time, HEADS, -1), 3, axis=-1)
    seen = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = x + seen.reshape(rows, time, width) @ params["mix"]
    hidden = jax.nn.gelu(normalized(x, params["scale2"]) @ params["hidden"])
    return x + hidden @ params["out"]


def predict(params, codes):
    """Logits of each next character: `[rows, T]` to `[rows, T, CHARACTERS]`."""
    x = params["characters"][codes] + params["places"][: codes.shape[1]]
    x = jaxdp.scan_layers(block, params["blocks"], x)
    return normalized(x, params["scale"]) @ params["characters"].T


def loss_fn(params, batch):
    """The mean loss of a character, in nats; averaged in float32."""
    logits = predict(params, batch[:, :-1]).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:])
    return losses.mean()


def load_text():
    """Windows of codes, `[windows, CONTEXT + 1]`."""
    text = "\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))
    codes = np.frombuffer(text.encode("ascii", "replace"), np.uint8).astype(np.int32)
    return np.lib.stride_tricks.sliding_window_view(codes, CONTEXT + 1)


def write(params, start, length, seed=0):
    """Goes on with a text, one character after the other, mostly likely ones."""

    @jax.jit
    def draw(params, codes, last, key):
        logits = predict(params, codes[None])[0, last]
        return jax.random.categorical(key, 2 * logits.astype(jnp.float32))

    codes = list(start.encode())
    for key in jax.random.split(jax.random.key(seed), length):
        seen = np.zeros(CONTEXT, int)
        seen[: len(codes)] = codes[-CONTEXT:]
        codes.append(int(draw(params, seen, min(len(codes), CONTEXT) - 1, key)))
    return bytes(codes).decode()


def main(steps=400, batch_size=32, blocks=BLOCKS, precision="bf16", devices=None):
    """Trains, prints and returns what came of it."""
    mesh = jaxdp.data_mesh(devices)
    train = jaxdp.data_parallel(
        loss_fn,
        optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 1e-2, 20, max(steps, 21))),
        mesh,
        jaxdp.Zero(stage=3, layers=("blocks",)),
        precision=jaxdp.Precision(precision),
    )
    state = train.init(init(jax.random.key(0), blocks=blocks))
    windows = load_text()
    sampler = jaxdp.Sampler(
        *(len(windows), batch_size),
        process_index=jax.process_index(),
        process_count=jax.process_count(),
    )
    losses = []
    for step, rows in enumerate(itertools.islice(sampler, steps), start=1):
        batch = jaxdp.shard_batch(windows[rows.indices], mesh)
        state, metrics = train.step(state, batch)
        losses.append(metrics["loss"])
        if jaxdp.process_zero() and step % 50 == 0:
            print(f"step {step}: loss {losses[-1]:.3f} nats per character")
    params = train.params(state)
    written = write(jaxdp.fetch(params), "The for statement ", 60)
    if jaxdp.process_zero():
        print(written)
    return {"losses": np.array(losses), "written": written, "params": params}


if __name__ == "__main__":
    if "JAX_NUM_CPU_DEVICES" not in os.environ:  # the launcher sets it
        jax.config.update("jax_num_cpu_devices", 8)  # used if there are no GPUs
    jaxdp.initialize()  # joins the other processes, if there are any
    main()
