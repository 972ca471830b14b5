"""`python -m jaxdp.program FILE`: reports of dumped programs."""

import gzip
import io
import json
import os
import re
import subprocess
import sys
import types

import jax
import pytest
from jax.sharding import PartitionSpec as P

import jaxdp
from jaxdp.program import __main__ as command
from jaxdp.program import analyze
from tests.modules import module_text


@pytest.fixture
def loop(tmp_path):
    """A module of seven permutes, as a file."""
    path = tmp_path / "module_0001.jit_f.sm_9.0_gpu_after_optimizations.txt"
    path.write_text(module_text("h100-loop"))
    return path


def test_it_prints_the_report(loop, capsys):
    assert command.main([str(loop)]) == 0
    printed = capsys.readouterr().out
    assert printed == analyze(module_text("h100-loop")).summary() + "\n"
    assert "sent      28672 B by every device" in printed
    assert "rounds    7 on the critical path" in printed


def test_it_reads_compressed_files_and_standard_input(tmp_path, capsys, monkeypatch):
    packed = gzip.compress(module_text("tpu-v5e-loop").encode())
    (tmp_path / "dump.txt.gz").write_bytes(packed)
    assert command.main([str(tmp_path / "dump.txt.gz")]) == 0
    first = capsys.readouterr().out
    standard = types.SimpleNamespace(buffer=io.BytesIO(packed))
    monkeypatch.setattr(sys, "stdin", standard)
    assert command.main(["-"]) == 0
    assert capsys.readouterr().out == first
    assert "7      8 pairs" in first


def test_json(loop, capsys):
    assert command.main([str(loop), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["devices"], record["rounds"]) == (8, 7)
    assert record["sent_bytes"] == [7 * 4096] * 8
    assert record["link_bytes"][0] == {"source": 0, "target": 1, "bytes": 28672}
    (op,) = record["collectives"]
    assert (op["kind"], op["arrays"], op["count"]) == (
        *("collective-permute", ["f32[1,1024]"], 7),
    )
    assert "timeline" not in record


def test_times_on_a_target(loop, capsys):
    assert command.main([str(loop), "--hardware", "h100"]) == 0
    printed = capsys.readouterr().out
    timeline = analyze(module_text("h100-loop")).timeline("h100")
    assert printed.endswith(f"{timeline}\n")
    assert command.main([str(loop), "--hardware", "h100", "--json"]) == 0
    times = json.loads(capsys.readouterr().out)["timeline"]
    assert times["step_s"] == timeline.step_s > 0
    assert times["hardware"] == timeline.hardware.name


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"module @jit_f {", "text that is not HLO and starts with 'module @jit_f {'"),
        (b"HloModule jit_f, num_partitions=8\n", "HLO text that is not optimized"),
        (b"\x0a\x07\xff\xfe proto", r"10 bytes that are not text: byte 2"),
        (b"\x1f\x8b\x08\x00 cut", "."),
        (b"", "text that is not HLO and starts with ''"),
    ],
    ids=["stablehlo", "before_optimizations", "proto", "broken_gzip", "empty"],
)
def test_files_that_are_no_programs(content, message, tmp_path, capsys):
    path = tmp_path / "dump.txt"
    path.write_bytes(content)
    assert command.main([str(path)]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith(f"{path}: ")
    assert len(printed.err.splitlines()) == 1
    assert re.search(message, printed.err)


def test_a_file_that_is_not_there(tmp_path, capsys):
    assert command.main([str(tmp_path / "gone.txt")]) == 2
    assert "No such file" in capsys.readouterr().err
    assert command.main([str(tmp_path)]) == 2
    assert "Is a directory" in capsys.readouterr().err


def test_an_unknown_target(loop, capsys):
    assert command.main([str(loop), "--hardware", "h1000"]) == 2
    assert "'h1000'. It must be one of h100, " in capsys.readouterr().err


def test_a_dump_of_xla(tmp_path):
    """The real thing, printed in a process of its own."""
    mesh = jaxdp.data_mesh(2)
    total = jax.shard_map(
        lambda x: jax.lax.psum(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P()
    )
    lowered = jax.jit(total).lower(jax.ShapeDtypeStruct((2, 16), "float32"))
    lowered.compile(compiler_options={"xla_dump_to": str(tmp_path)})
    (dump,) = tmp_path.glob("*cpu_after_optimizations.txt")
    printed = subprocess.run(
        [sys.executable, "-m", "jaxdp.program", str(dump)],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert printed.splitlines()[0] == "1 collective on 2 devices"
    assert "sent      64 B by every device" in printed
