"""What waits for what: by hand-written programs, random ones, and compiled ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxdp
from jaxdp.program.dependence import dependence

A = "f32[8,8]"
DOT = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"
PAIRS = "channel_id=1, source_target_pairs={{0,1},{1,0}}"
HEADER = "HloModule m, is_scheduled=true, num_partitions=2\n\n"


def _text(entry, *computations):
    """A module; computations are (name, lines), the entry is lines."""
    blocks = [
        f"%{name} () -> {A} {{\n{_lines(body)}}}\n" for name, body in computations
    ]
    return HEADER + "\n".join(
        [*blocks, f"ENTRY %main () -> {A} {{\n{_lines(entry)}}}\n"]
    )


def _lines(body):
    return "".join(f"  {line}\n" for line in body.strip().splitlines())


ENTRY = f"%x = {A} parameter(0)\n%y = {A} parameter(1)\n"
MOVE = f"%move = {A} collective-permute(%y), {PAIRS}\n"
MULTIPLY = f"%dot = {A} dot(%x, %x), {DOT}\n"
INNER = f"%p = {A} parameter(0)\n%q = {A} parameter(1)\n"
INNER_DOT = f"{INNER}%dot = {A} dot(%p, %p), {DOT}\nROOT %s = {A} add(%dot, %q)"
INNER_MOVE = f"%p = {A} parameter(0)\nROOT %move = {A} collective-permute(%p), {PAIRS}"
SEND = f"%move = {A} collective-permute(%r), {PAIRS}"
PROGRAMS = {
    "nothing in common": (_text(ENTRY + MOVE + MULTIPLY), set()),
    "permute of a product": (
        _text(f"{ENTRY}{MULTIPLY}%r = {A} negate(%dot)\n{SEND}"),
        {("move", "dot")},
    ),
    "product of what was sent": (
        _text(f"{ENTRY}{MOVE}%dot = {A} dot(%move, %x), {DOT}"),
        {("dot", "move")},
    ),
    "inside a fusion": (
        _text(
            f"{ENTRY}%f = {A} fusion(%x, %y), kind=kOutput, calls=%inner\n"
            f"%r = {A} negate(%f)\n{SEND}",
            ("inner", INNER_DOT),
        ),
        {("move", "dot")},
    ),
    "into a fusion, at an operand that its product does not use": (
        _text(
            f"{ENTRY}{MOVE}%f = {A} fusion(%x, %move), kind=kOutput, calls=%inner",
            ("inner", INNER_DOT),
        ),
        {("dot", "move")},
    ),
    "by a call": (
        _text(
            f"{ENTRY}%f = {A} call(%x, %y), to_apply=%inner\n"
            f"%r = {A} negate(%f)\n{SEND}",
            ("inner", INNER_DOT),
        ),
        {("move", "dot")},
    ),
    "the other element of a tuple": (
        _text(
            f"{ENTRY}{MULTIPLY}%t = ({A}, {A}) tuple(%dot, %y)\n"
            f"%r = {A} get-tuple-element(%t), index=1\n{SEND}"
        ),
        set(),
    ),
    "the same element of a tuple": (
        _text(
            f"{ENTRY}{MULTIPLY}%t = ({A}, {A}) tuple(%y, %dot)\n"
            f"%r = {A} get-tuple-element(%t), index=1\n{SEND}"
        ),
        {("move", "dot")},
    ),
    "an element of what a fusion gives": (
        _text(
            f"{ENTRY}%f = ({A}, {A}) fusion(%x, %y), kind=kOutput, calls=%inner\n"
            f"%r = {A} get-tuple-element(%f), index=1\n{SEND}",
            ("inner", INNER_DOT.replace("ROOT ", "")),
        ),
        {("move", "dot")},
    ),
    "in a branch": (
        _text(
            f"{ENTRY}%i = pred[] parameter(2)\n"
            f"%c = {A} conditional(%i, %x, %y), true_computation=%inner, "
            f"false_computation=%other\n%r = {A} negate(%c)\n{SEND}",
            ("inner", f"%p = {A} parameter(0)\nROOT %dot = {A} dot(%p, %p), {DOT}"),
            ("other", f"ROOT %o = {A} parameter(0)"),
        ),
        {("move", "dot")},
    ),
    "by the condition of a branch": (
        _text(
            f"{ENTRY}{MULTIPLY}%i = pred[] custom-call(%dot), "
            f'custom_call_target="first"\n'
            f"%c = {A} conditional(%i, %y, %y), branch_computations={{%inner, %other}}",
            ("inner", INNER_MOVE),
            ("other", f"ROOT %o = {A} parameter(0)"),
        ),
        {("move", "dot")},
    ),
    "a loop": (
        _text(
            f"{ENTRY}%t = ({A}, {A}) tuple(%x, %y)\n"
            f"%w = ({A}, {A}) while(%t), condition=%end, body=%turn",
            (
                "turn",
                f"%c = ({A}, {A}) parameter(0)\n"
                f"%x1 = {A} get-tuple-element(%c), index=0\n"
                f"%dot = {A} dot(%x1, %x1), {DOT}\n"
                f"%move = {A} collective-permute(%x1), {PAIRS}\n"
                f"ROOT %n = ({A}, {A}) tuple(%move, %dot)",
            ),
            ("end", f"%e = ({A}, {A}) parameter(0)\nROOT %k = pred[] constant(false)"),
        ),
        {("move", "dot"), ("dot", "move"), ("dot", "dot"), ("move", "move")},
    ),
    "asynchronous halves": (
        _text(
            f"{ENTRY}%move = ({A}, {A}) collective-permute-start(%y), {PAIRS}\n"
            f"%before = {A} dot(%x, %x), {DOT}\n"
            f"%d = {A} collective-permute-done(%move)\n"
            f"%dot = {A} dot(%d, %before), {DOT}"
        ),
        {("dot", "move"), ("dot", "before")},
    ),
    "wrapped asynchronously": (
        _text(
            f"{ENTRY}%s = (({A}), {A}) async-start(%y), calls=%inner\n"
            f"%d = {A} async-done(%s), calls=%inner\n"
            f"%dot = {A} dot(%d, %x), {DOT}",
            ("inner", INNER_MOVE),
        ),
        {("dot", "move")},
    ),
    "a control dependency": (
        _text(f"{ENTRY}{MULTIPLY}{MOVE.strip()}, control-predecessors={{%x, %dot}}"),
        {("move", "dot")},
    ),
    "a library's product": (
        _text(
            f"{ENTRY}%dot = {A} custom-call(%x, %y), "
            f'custom_call_target="__cublas$gemm"\n'
            f"%r = {A} negate(%dot)\n{SEND}"
        ),
        {("move", "dot")},
    ),
    "a convolution": (
        _text(
            f"{ENTRY}%dot = {A} convolution(%x, %y), dim_labels=bf_io->bf\n"
            f"%r = {A} negate(%dot)\n{SEND}"
        ),
        {("move", "dot")},
    ),
    "one computation, called after and apart": (
        _text(
            f"{ENTRY}{MOVE}%f = {A} call(%move, %y), to_apply=%inner\n"
            f"%g = {A} call(%x, %x), to_apply=%inner",
            ("inner", INNER_DOT),
        ),
        {("dot", "move")},
    ),
    "one computation, called before and after": (
        _text(
            f"{ENTRY}%f = {A} call(%x, %y), to_apply=%inner\n"
            f"%move = {A} collective-permute(%f), {PAIRS}\n"
            f"%g = {A} call(%move, %y), to_apply=%inner",
            ("inner", INNER_DOT),
        ),
        {("move", "dot"), ("dot", "move"), ("dot", "dot")},
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_hand_written_programs(name):
    text, expected = PROGRAMS[name]
    found = dependence(text)
    pairs = {(who, whom) for who, names in found.waits_for.items() for whom in names}
    assert pairs == expected
    assert found.collectives.keys() == {"move"}
    assert "dot" in found.matmuls
    between = {("move", "dot"), ("dot", "move")} & expected
    after = found.collectives_after_matmuls(), found.matmuls_after_collectives()
    assert {(a, b) for each in after for a, names in each.items() for b in names} == {
        *between,
    }


@pytest.mark.parametrize("seed", range(4))
def test_random_programs_against_the_closure_of_a_matrix(seed):
    random = np.random.default_rng(seed)
    count = 40
    edges = np.zeros((count, count), bool)  # [user, operand]
    lines, kinds = [f"%i{n} = {A} parameter({n})" for n in range(2)], ["other"] * 2
    for n in range(2, count):
        operands = random.choice(n, 2)
        edges[n, operands] = True
        names = ", ".join(f"%i{operand}" for operand in operands)
        kind = str(random.choice(["dot", "move", "other"], p=[0.3, 0.2, 0.5]))
        kinds.append(kind)
        if kind == "move":
            edges[n, operands[1]] = operands[0] == operands[1]
            lines.append(f"%i{n} = {A} collective-permute(%i{operands[0]}), {PAIRS}")
        else:
            rest = f"dot({names}), {DOT}" if kind == "dot" else f"add({names})"
            lines.append(f"%i{n} = {A} {rest}")
    reach = edges.astype(int)
    for _ in range(count):
        reach = np.minimum(reach + reach @ edges, 1)
    named = [n for n, kind in enumerate(kinds) if kind != "other"]
    found = dependence(_text("\n".join(lines)))
    assert found.waits_for == {
        f"i{n}": {f"i{m}" for m in named if reach[n, m]} for n in named
    }
    assert found.matmuls == {f"i{n}" for n in named if kinds[n] == "dot"}


def _compiled(function):
    mesh = jaxdp.data_mesh(2)
    mapped = jax.shard_map(
        function, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False
    )
    x = jax.ShapeDtypeStruct((64, 32), jnp.float32)
    w = jax.ShapeDtypeStruct((64, 32), jnp.float32)
    return jax.jit(mapped).lower(x, w).compile()


def _swap(x):
    return lax.ppermute(x, "data", [(0, 1), (1, 0)])


COMPILED = {
    "apart": (lambda x, w: (_swap(jnp.sin(x)), jnp.tanh(x @ w)), (0, 0)),
    "sent after": (lambda x, w: _swap(jnp.tanh(x @ w)), (1, 0)),
    "sent before": (lambda x, w: jnp.tanh(_swap(x) @ w), (0, 1)),
    "under a condition": (
        lambda x, w: lax.cond(
            jnp.sum(_swap(x)) > 0, lambda: jnp.tanh(x @ w), lambda: x
        ),
        (0, 1),
    ),
    "in a loop": (
        lambda x, w: lax.fori_loop(0, 3, lambda _, h: _swap(jnp.tanh(h @ w)), x),
        (1, 1),
    ),
}


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_programs(name):
    function, (moves, dots) = COMPILED[name]
    found = dependence(_compiled(function))
    assert len(found.collectives) == len(found.matmuls) == 1
    assert len(found.collectives_after_matmuls()) == moves
    assert len(found.matmuls_after_collectives()) == dots


def test_collectives_say_what_they_move():
    found = dependence(_text(ENTRY + MOVE))
    assert found.collectives["move"].pairs == ((0, 1), (1, 0))
    assert found.collectives["move"].bytes == 8 * 8 * 4


def test_an_operand_that_is_not_there():
    with pytest.raises(ValueError, match=r"no 'z' before 'r'.*stands after everything"):
        dependence(_text(f"{ENTRY}%r = {A} negate(%z)\n%z = {A} negate(%x)"))


def test_what_is_no_program_is_refused():
    with pytest.raises(TypeError, match=r"dependence got a function.*\.compile\(\)"):
        dependence(lambda x: x)
