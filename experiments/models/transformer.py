"""A small causal transformer over characters: Vaswani et al., NIPS 2017."""

import jax
import jax.numpy as jnp
from flax import nnx

GPT2_SMALL = {
    "vocabulary": 50257,
    "context": 1024,
    "width": 768,
    "blocks": 12,
    "heads": 12,
    "tied": True,
}


class Block(nnx.Module):
    """Attention to characters before, then two linear layers, each added to its input.

    Layers are normalised first (Xiong et al. 2020), so that plain SGD trains them too.
    """

    def __init__(self, width: int, heads: int, rngs: nnx.Rngs):
        """Makes about 12 x `width`² parameters."""
        self.norm1 = nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(heads, width, decode=False, rngs=rngs)
        self.norm2 = nnx.LayerNorm(width, rngs=rngs)
        self.hidden = nnx.Linear(width, 4 * width, rngs=rngs)
        self.out = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        """`[B, T, width]` to the same."""
        x = x + self.attention(self.norm1(x), mask=mask)
        return x + self.out(nnx.gelu(self.hidden(self.norm2(x))))


class CharTransformer(nnx.Module):
    """Blocks of attention: characters `[B, T]` to logits `[B, T, vocabulary]`.

    With `GPT2_SMALL` it has the sizes of the smallest GPT-2 (Radford et al. 2019, table
    2): 124,439,808 parameters, since `tied` uses the table of embeddings twice.
    """

    def __init__(
        self,
        rngs: nnx.Rngs,
        vocabulary: int = 128,
        context: int = 32,
        width: int = 48,
        blocks: int = 2,
        heads: int = 4,
        tied: bool = False,
    ):
        """Makes 70,592 parameters, or others with other sizes."""
        self.characters = nnx.Embed(vocabulary, width, rngs=rngs)
        self.places = nnx.Embed(context, width, rngs=rngs)
        self.blocks = nnx.List([Block(width, heads, rngs) for _ in range(blocks)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.head = None if tied else nnx.Linear(width, vocabulary, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Logits of each next character, from it and those before it alone."""
        mask = nnx.make_causal_mask(x)
        x = self.characters(x) + self.places(jnp.arange(x.shape[1]))[None]
        for block in self.blocks:
            x = block(x, mask)
        x = self.norm(x)
        return self.characters.attend(x) if self.head is None else self.head(x)
