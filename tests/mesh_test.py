"""Meshes have one Auto axis; what cannot be one is refused with counts and remedy."""

import os
import subprocess
import sys

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh

import jaxdp
from jaxdp.mesh import auto_mesh


def test_there_are_eight_devices():
    """Nothing passes for lack of devices."""
    assert jax.device_count() == 8


def test_the_fixture_has_all_sizes(mesh):
    assert mesh.shape == {"data": mesh.size}
    assert mesh.size in (1, 2, 3, 8)


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        (None, range(8)),
        (3, range(3)),
        (np.int64(2), range(2)),
        (8, range(8)),
    ],
    ids=["all", "count", "numpy_count", "as_many_as_exist"],
)
def test_a_mesh_of_so_many_devices(devices, expected):
    mesh = jaxdp.data_mesh(devices)
    assert list(mesh.devices) == [jax.devices()[i] for i in expected]
    assert mesh.axis_names == ("data",)
    assert mesh.axis_types == (AxisType.Auto,)


def test_a_mesh_of_chosen_devices_keeps_their_order():
    chosen = [jax.devices()[i] for i in (5, 0, 3)]
    assert list(jaxdp.data_mesh(chosen).devices) == chosen
    assert jaxdp.data_mesh(chosen, axis_name="batch").axis_names == ("batch",)


@pytest.mark.parametrize("count", [9, 16, 0, -1])
def test_counts_that_do_not_exist_are_refused(count):
    message = (
        rf"data_mesh got devices={count}, and JAX started with 8 cpu device\(s\).*"
        rf"between 1 and 8.*'jax_num_cpu_devices', {max(count, 1)}\)"
    )
    with pytest.raises(ValueError, match=message):
        jaxdp.data_mesh(count)


@pytest.mark.parametrize(
    ("chosen", "counts"),
    [([], "0 devices, 0"), ([0, 1, 0], "3 devices, 2"), ([4, 4], "2 devices, 1")],
)
def test_no_devices_and_the_same_twice_are_refused(chosen, counts):
    with pytest.raises(ValueError, match=f"data_mesh got {counts} of them distinct"):
        jaxdp.data_mesh([jax.devices()[i] for i in chosen])


@pytest.mark.parametrize(
    ("devices", "shown"),
    [([0, 1], "0"), ("4", "'4'"), (2.0, r"2\.0"), (True, "True"), ([None], "None")],
)
def test_what_is_no_device_is_refused(devices, shown):
    with pytest.raises(TypeError, match=rf"data_mesh got {shown} among.*jax\.devices"):
        jaxdp.data_mesh(devices)


@pytest.mark.parametrize("axis_name", ["data", None])
def test_other_meshes_with_one_axis_become_auto(axis_name):
    explicit = jax.make_mesh((4,), ("data",))
    assert explicit.axis_types == (AxisType.Explicit,)
    mesh = auto_mesh(explicit, axis_name, "init")
    assert mesh == jaxdp.data_mesh(4)
    assert auto_mesh(mesh, axis_name, "init") == mesh


@pytest.mark.parametrize(
    ("axes", "axis_name", "message"),
    [
        (("data",), "batch", r"init got a mesh with axes \('data',\).*'batch' and no"),
        (
            ("data", "model"),
            "data",
            r"axes \('data', 'model'\).*exactly the axis 'data'",
        ),
        (("data", "model"), None, r"axes \('data', 'model'\).*exactly one axis"),
    ],
    ids=["other_axis", "two_axes", "two_axes_any_name"],
)
def test_meshes_with_other_axes_are_refused(axes, axis_name, message):
    devices = np.array(jax.devices()[:4]).reshape([4, 1][: len(axes)])
    with pytest.raises(ValueError, match=message):
        auto_mesh(Mesh(devices, axes), axis_name, "init")


def test_what_is_no_mesh_is_refused():
    with pytest.raises(
        TypeError, match=r"init got mesh=8\. It needs a jax.sharding.Mesh"
    ):
        auto_mesh(8, "data", "init")  # pyright: ignore[reportArgumentType]


ASK_TOO_LATE = """
import os, jax
found = len(jax.devices())
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
import jaxdp
try:
    jaxdp.data_mesh(8)
except ValueError as error:
    print(found, error)
print(jaxdp.data_mesh().size)
"""

ASK_IN_TIME = """
import jaxdp
print(jaxdp.data_mesh(8).size)
"""


def run_alone(program: str, **variables: str) -> str:
    """What a fresh Python prints."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")
    }
    result = subprocess.run(
        [sys.executable, "-c", program],
        env=inherited | {"JAX_PLATFORMS": "cpu"} | variables,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_more_devices_than_jax_started_with_are_refused():
    """ER-3: a flag that comes too late is no silent run on one device."""
    *printed, size = run_alone(ASK_TOO_LATE).splitlines()
    assert size == "1"
    assert printed[0].startswith(
        "1 data_mesh got devices=8, and JAX started with 1 cpu device(s). The count "
        "must lie between 1 and 1."
    )
    assert "jax.config.update('jax_num_cpu_devices', 8)" in printed[0]
    assert "JAX_NUM_CPU_DEVICES=8" in printed[0]


def test_the_remedy_that_the_error_names_works():
    assert run_alone(ASK_IN_TIME, JAX_NUM_CPU_DEVICES="8") == "8"


@pytest.mark.parametrize("axis_type", [AxisType.Explicit, AxisType.Auto], ids=str)
def test_a_mesh_that_is_set_does_not_reach_the_port(axis_type):
    mesh = Mesh(np.array(jax.devices()[::-1]), ("rows",), axis_types=(axis_type,))
    w, x = np.arange(1.0, 4.0), np.arange(12.0).reshape(4, 3)
    w, x = w.astype(np.float32), x.astype(np.float32)
    model = jaxdp.DataParallel(lambda w, x: x @ w, w, device_ids=[5, 2])
    step = model.train_step(lambda output, y: (output - y).mean(), optax.sgd(1.0))
    with jax.set_mesh(mesh):
        output = model(x)
        state, metrics = step(step.init(), x, np.ones(4, np.float32))
    assert output.devices() == metrics["loss"].devices() == {jax.devices()[5]}
    np.testing.assert_array_equal(output, [8, 26, 44, 62])
    assert metrics["loss"] == 34
    np.testing.assert_array_equal(state.params, w - x.mean(axis=0))
