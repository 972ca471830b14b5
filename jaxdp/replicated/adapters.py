"""Flax modules as models: split into parameters and buffers, merged inside.

Buffers are all that a module holds beside its parameters, such as the statistics of
BatchNorm. As in PyTorch, every replica sees its own slice of the batch and the buffers
of the root, and only the root's updates survive a step: after training, the statistics
are those of the root's slices, about 1 / N of the data. For statistics of the whole
batch, use a design of `jaxdp.data_parallel` and give BatchNorm the mesh axis,
`axis_name="data"`: then its replicas are one program, and average over it.

Flax computes variances as E[x²] - E[x]² by default, which cancels for means far from
zero; `use_fast_variance=False` does not.
"""

from typing import Any

from jaxdp.replicated.model import DataParallel

PyTree = Any


def from_nnx(module: Any, **options: Any) -> DataParallel:
    """A model from a Flax NNX module.

    Args:
        module: Any `nnx.Module`. It is read, never changed: `nnx.update(module, params,
            model_state)` puts trained values back.
        **options: `device_ids`, `output_device`, `dim`, as of `DataParallel`.

    Returns:
        A model whose `params` are the module's `nnx.Param`s as nested dictionaries, and
        whose `model_state` all its other variables, or None. Keys of `nnx.Rngs` differ
        on every replica.

    Raises:
        TypeError: No NNX module.

    Example:
        >>> import jax.numpy as jnp, jaxdp
        >>> from flax import nnx
        >>> model = jaxdp.replicated.from_nnx(nnx.Linear(3, 2, rngs=nnx.Rngs(0)))
        >>> model(jnp.ones((10, 3))).shape
        (10, 2)
    """
    from flax import nnx

    if not isinstance(module, nnx.Module):
        raise TypeError(
            f"from_nnx got {type(module).__name__}. It must be an instance of "
            "flax.nnx.Module. Use from_linen(module, variables) for flax.linen, and "
            "DataParallel(apply_fn, params) for anything else."
        )
    graphdef, params, rest = nnx.split(module, nnx.Param, ...)
    has_state = bool(rest)

    def apply_fn(params, *inputs, model_state=None, **keywords):
        parts = [params] if model_state is None else [params, model_state]
        merged = nnx.merge(graphdef, *map(nnx.State, parts))
        output = merged(*inputs, **keywords)
        if not has_state:
            return output
        _, _, rest = nnx.split(merged, nnx.Param, ...)
        return output, nnx.to_pure_dict(rest)

    state = nnx.to_pure_dict(rest) if has_state else None
    params = nnx.to_pure_dict(params)
    return DataParallel(apply_fn, params, model_state=state, **options)


def from_linen(module: Any, variables: PyTree, **options: Any) -> DataParallel:
    """A model from a Flax Linen module.

    Args:
        module: Any `flax.linen.Module`.
        variables: What `module.init` returned.
        **options: `device_ids`, `output_device`, `dim`, as of `DataParallel`.

    Returns:
        A model whose `params` are the collection "params", and whose `model_state` the
        other collections, or None. Keywords of a call reach `module.apply`, `rngs=`
        too, whose keys differ on every replica.

    Raises:
        TypeError: No Linen module.
        ValueError: `variables` without the collection "params".

    Example:
        >>> import flax.linen as nn, jax, jax.numpy as jnp, jaxdp
        >>> dense, x = nn.Dense(2), jnp.ones((10, 3))
        >>> variables = dense.init(jax.random.key(0), x)
        >>> jaxdp.replicated.from_linen(dense, variables)(x).shape
        (10, 2)
    """
    import flax.linen as nn

    if not isinstance(module, nn.Module):
        raise TypeError(
            f"from_linen got {type(module).__name__}. It must be an instance of "
            "flax.linen.Module. Use from_nnx(module) for flax.nnx, and "
            "DataParallel(apply_fn, params) for anything else."
        )
    if "params" not in variables:
        raise ValueError(
            f"from_linen got variables with the collections {sorted(variables)}. It "
            "needs 'params' among them. Pass what module.init returned, whole."
        )
    state = {name: each for name, each in variables.items() if name != "params"}

    def apply_fn(params, *inputs, model_state=None, **keywords):
        if not state:
            return module.apply({"params": params}, *inputs, **keywords)
        together = {"params": params, **(model_state or {})}
        output, new = module.apply(together, *inputs, mutable=list(state), **keywords)
        return output, {**(model_state or {}), **new}

    params = variables["params"]
    return DataParallel(apply_fn, params, model_state=state or None, **options)
