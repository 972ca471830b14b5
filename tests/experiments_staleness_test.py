"""The experiment `staleness`: what is trained, how runs are compared, and verdicts."""

import dataclasses
import math
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments import models, staleness
from experiments.parts import staleness_answers as answers
from experiments.parts import staleness_claims as claims
from experiments.parts import staleness_delays as delays
from experiments.parts import staleness_figures as figures
from experiments.parts import staleness_runs as runs
from experiments.parts import staleness_tables as tables
from experiments.parts import staleness_tasks as tasks
from experiments.parts import text
from experiments.parts.staleness_curves import WORST, curve
from experiments.parts.staleness_runs import Key, Setting
from experiments.parts.staleness_tasks import Task
from jaxdp.asynchronous import Bounded, Eventual, Link, Sequential
from tests import experiments_contract as contract

WORKERS, ROUNDS = 3, 4
SETTING = Setting(
    workers=WORKERS,
    rounds=ROUNDS,
    compute_s=2.0,
    noise=0.0,
    slowdown=5.0,
    link=Link(),
    seed=0,
)


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """A tiny run."""
    return contract.run("staleness", tmp_path_factory.mktemp("results"))


@pytest.fixture(scope="module")
def found(ran):
    """What a tiny run found."""
    return ran.found


def test_what_is_written(ran):
    contract.check(ran, {"CB4": "partly", "CB5": "partly"})


@pytest.fixture(scope="module")
def problem():
    return text.problem(seed=3)


def by(rows, *columns):
    """Rows of a table, by some of their columns."""
    return {tuple(row[column] for column in columns): row for row in rows}


# One parameter, whose own value is evaluated; every push pulls it elsewhere.
TOY = Task(
    name="digits",
    loss_fn=lambda x, target: jnp.sum((x - target) ** 2) / 2,
    params=jnp.array([1.5]),
    batches=lambda worker, iteration: np.float32(0.3 * worker + iteration**2),
    evaluate=lambda x: float(x[0]),
    test=lambda x: float(x[0]) - 50,
)


def test_the_transformer_has_the_size_it_says(problem):
    assert sum(x.size for x in jax.tree.leaves(problem.params)) == 70_592
    assert "70,592" in (models.CharTransformer.__init__.__doc__ or "")


def test_the_transformer_sees_no_later_character(problem):
    characters = np.arange(2 * 9).reshape(2, 9) % 128
    changed = characters.copy()
    changed[1, 5] += 1
    with jax.numpy_rank_promotion("allow"):
        apply = jax.jit(problem.apply)
        logits, others = (apply(problem.params, x) for x in (characters, changed))
    assert logits.shape == (2, 9, 128)
    same = np.all(np.asarray(logits) == np.asarray(others), axis=-1)
    assert same[0].all() and same[1, :5].all() and not same[1, 5:].any()
    with jax.numpy_rank_promotion("allow"):
        places = apply(problem.params, np.full((2, 9), 97))[0]
    assert len(np.unique(np.asarray(places), axis=0)) == 9  # it sees where it is


def test_the_transformer_learns_more_than_letter_frequencies(problem):
    counts = np.bincount(problem.train, minlength=128) / len(problem.train)
    entropy = -np.sum(counts[counts > 0] * np.log(counts[counts > 0]))
    optimizer = optax.adam(1e-2)

    @jax.jit
    def update(params, opt_state, batch):
        loss, gradient = jax.value_and_grad(problem.loss_fn)(params, batch)
        updates, opt_state = optimizer.update(gradient, opt_state)
        return optax.apply_updates(params, updates), opt_state, loss

    params, opt_state = problem.params, optimizer.init(problem.params)
    random, losses = np.random.default_rng(0), []
    with jax.numpy_rank_promotion("allow"):
        for _ in range(70):
            batch = text.windows(problem.train, 16, random)
            params, opt_state, loss = update(params, opt_state, batch)
            losses.append(float(loss))
    assert losses[0] > math.log(128)
    assert np.mean(losses[-20:]) < entropy - 0.2


def test_text_is_split_by_topic_and_stays_ascii(problem):
    assert text.codes("aéβ\n").tolist() == [97, 63, 63, 10]
    train, test = text.split(seed=3)
    assert len(test) < len(train) / 5
    for codes in (train, test):
        assert codes.dtype == np.int32 and 0 <= codes.min() and codes.max() < 128
    start = "".join(map(chr, test[:200]))
    assert start not in "".join(map(chr, train))
    assert text.split(seed=4)[1][:50].tolist() != test[:50].tolist()
    assert text.split(seed=3)[1].tolist() == test.tolist() == problem.test.tolist()


def test_training_sees_no_test_data(problem, monkeypatch):
    given = problem._replace(test=np.full(99, 97, np.int32))
    monkeypatch.setattr(text, "problem", lambda seed: given)
    task, training = tasks.text_task(seed=0), problem.train.tobytes()
    for row in task.batches(1, 2):
        assert row.tobytes() in training
    with jax.numpy_rank_promotion("allow"):
        rows = np.full((tasks.EVALUATED["text"], text.CONTEXT + 1), 97, np.int32)
        unseen = float(task.loss_fn(task.params, rows))
        assert task.test(task.params) == pytest.approx(unseen)
        assert task.evaluate(task.params) != pytest.approx(unseen, rel=1e-3)


def test_windows_are_stretches_of_the_text():
    batch = text.windows(np.arange(100), 50, np.random.default_rng(0))
    assert batch.shape == (50, text.CONTEXT + 1)
    assert np.all(np.diff(batch) == 1)
    assert len(set(batch[:, 0])) > 10 and batch.max() < 100


def test_every_push_has_rows_of_its_own(problem, monkeypatch):
    monkeypatch.setattr(text, "problem", lambda seed: problem)
    digits, stretches = tasks.digits_task(seed=0), tasks.text_task(seed=0)
    images, labels = digits.batches(1, 2)
    assert images.shape == (tasks.ROWS["digits"], 8, 8, 1) and labels.shape == (8,)
    for task in (digits, stretches):
        first, *others = (
            np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(batch)])
            for batch in (task.batches(1, 2), task.batches(2, 2), task.batches(1, 3))
        )
        assert all(not np.array_equal(first, other) for other in others)
    np.testing.assert_array_equal(images, digits.batches(1, 2)[0])
    assert digits.size_bytes == 4 * 38_282 and stretches.size_bytes == 4 * 70_592


@pytest.mark.parametrize(
    ("name", "policy", "step"),
    [
        ("SGD", runs.SYNCHRONOUS, 0.1 * 2),
        ("SGD", "τ = 0", 0.1 * 2 / 3),
        ("momentum", runs.NO_BOUND, 0.02 * 2 / 3),
        ("Adam", runs.SYNCHRONOUS, 0.005),
        ("Adam", "τ = 4", 0.005 / math.sqrt(3)),
    ],
    ids=["SGD, all", "SGD, each", "momentum, each", "Adam, all", "Adam, each"],
)
def test_a_push_is_applied_at_an_equal_rate_per_sample(name, policy, step):
    optimizer = runs.optimizer_of(Key("digits", name, runs.EQUAL, policy), SETTING)
    gradient = jnp.array([2.0])
    state = optimizer.init(gradient)
    steps = []
    for _ in range(2):
        updates, state = optimizer.update(gradient, state, gradient)
        steps.append(-float(jax.tree.leaves(updates)[0][0]))
    again = 1.9 if name == "momentum" else 1
    np.testing.assert_allclose(steps, [step, again * step], rtol=1e-4)


def test_bounds_go_from_none_ahead_to_no_bound():
    assert [
        p.max_staleness for p in runs.POLICIES.values() if isinstance(p, Bounded)
    ] == [0, 1, 2, 4, 8]
    assert runs.POLICIES[runs.SYNCHRONOUS] == Sequential()
    assert runs.POLICIES[runs.NO_BOUND] == Eventual()


def test_the_straggler_is_the_last_worker():
    medians = [[t.median_s for t in SETTING.times(speeds)] for speeds in runs.SPEEDS]
    assert medians == [[2.0, 2.0, 2.0], [2.0, 2.0, 10.0]]


def test_a_message_takes_latency_and_bandwidth():
    config = staleness.Config(latency_us=30.0, bandwidth_gbit_s=2.0, compute_ms=7.0)
    setting = staleness.make_setting(config)
    assert setting.link == Link(30e-6, 4e-9) and setting.compute_s == 7e-3
    (row,) = tables.messages([TOY], setting)
    assert row["message_ms"] == pytest.approx(0.03 + 4 * 4e-6)
    assert row["all workers' messages_ms"] == pytest.approx(8 * (0.03 + 4 * 4e-6))


def test_a_delay_is_the_same_for_every_push():
    """Against the recursion x[t + 1] = x[t] - rate * g(x[t - delay])."""
    curves = delays.every_delay([TOY], ["SGD"], SETTING, lambda: None)
    pushes, rate = WORKERS * ROUNDS, 0.1 / WORKERS
    for delay, found in curves["digits", "SGD"].items():
        workers, x = 1 + WORKERS * delay, [1.5]
        for push in range(pushes):
            pulled = x[max(0, push - WORKERS * delay)]
            target = TOY.batches(push % workers, push // workers)
            x.append(x[-1] - rate * (pulled - target))
        every = runs.EVERY * WORKERS
        assert found.pushes.tolist() == [*range(0, pushes + 1, every)]
        np.testing.assert_allclose(found.losses, x[::every], rtol=1e-5)


def test_a_larger_batch_averages_pushes_of_the_same_weights():
    curves = delays.every_delay([TOY], ["SGD"], SETTING, lambda: None)
    for delay in (0, 1, 2):
        size, x = WORKERS * (delay + 1), 1.5
        for start in range(0, WORKERS * ROUNDS - size + 1, size):
            targets = [TOY.batches(0, push) for push in range(start, start + size)]
            x -= 0.1 * (delay + 1) * np.mean([x - target for target in targets])
        found = curves["digits", delays.LARGER_BATCH][delay]
        np.testing.assert_allclose(found.losses[-1], x, rtol=1e-5)


def test_all_runs_apply_as_many_pushes():
    for policy in runs.POLICIES.values():
        run = runs.train(TOY, policy, tasks.optimizer("SGD", 0.1), SETTING, runs.EQUAL)
        assert sum(run.applied) == WORKERS * ROUNDS
        assert curve(run).pushes.tolist() == [0, 6, 12]


def test_a_run_that_diverges_ends():
    task = TOY._replace(evaluate=lambda x: float(x[0] ** 2))
    optimizer = tasks.optimizer("SGD", 1e30)
    run = runs.train(task, Eventual(), optimizer, SETTING, runs.EQUAL)
    found = curve(run)
    assert sum(run.refused) > 0
    assert found.losses[-1] == WORST
    assert found.in_words(found.mean) == "diverged"


def test_losses_are_averaged_between_evaluations():
    run: Any = types.SimpleNamespace(
        evaluations=[(0, 0.0, 8.0), (2, 0.5, 4.0), (4, 2.0, 1.0), (5, 3.0, math.nan)],
        policy=Sequential(),
        workers=3,
    )
    found = curve(run)
    assert found.pushes.tolist() == [0, 6, 12, 15]
    assert found.times_ms.tolist() == [0, 500, 2000, 3000]
    assert found.losses.tolist() == [8, 4, 1, WORST]
    found = found._replace(losses=np.array([8.0, 4.0, 1.0, 3.0]))
    assert found.mean == pytest.approx((6 * 6 + 6 * 2.5 + 3 * 2) / 15)
    assert found.at_the_end == pytest.approx((1 + 3) / 2)
    # From 1,600 to 2,000 ms the loss falls from 1.8 to 1.
    assert found.at_ms(2000) == pytest.approx(1.4)
    assert found.highest_after(0.5) == 3 and found.highest_after(0.1) == 4
    assert found.in_words(7.5) == 7.5 and found.in_words(8.5) == "diverged"


def test_equal_time_is_when_the_run_without_a_bound_ends():
    def run(policy, in_an_update, end_s) -> Any:
        evaluations = [(0, 0.0, 9.0), (12 // in_an_update, end_s, 1.0)]
        return types.SimpleNamespace(
            evaluations=evaluations, policy=policy, workers=3, duration_s=end_s
        )

    found = {
        Key("digits", "SGD", runs.EQUAL, name): run(policy, 1, 1.0)
        for name, policy in runs.POLICIES.items()
    }
    found[Key("digits", "SGD", runs.EQUAL, runs.SYNCHRONOUS)] = run(
        Sequential(), 3, 4.0
    )
    (row,) = tables.timely_losses(found)
    assert row["time_ms"] == 1000
    assert row[runs.NO_BOUND] == pytest.approx(1.8)  # mean of 2.6 and 1
    assert row[runs.SYNCHRONOUS] == pytest.approx(7.2)  # 9 - 8 * 0.9 / 4
    (row,) = tables.last_losses(found)
    assert row[runs.NO_BOUND] == row[runs.SYNCHRONOUS] == pytest.approx(1.8)


def test_test_losses_are_of_the_last_version():
    found = runs.every_policy([TOY], ["SGD"], SETTING, lambda: None)
    rows = by(tables.test_losses(found, [TOY]), "workers")
    for key, run in found.items():
        assert rows[key.speeds,][key.policy] == float(run.params[0]) - 50
    synchronous = rows[runs.EQUAL,][runs.SYNCHRONOUS]
    assert rows[runs.EQUAL,]["τ = 0"] == pytest.approx(synchronous)
    assert rows[runs.STRAGGLER,][runs.NO_BOUND] != pytest.approx(synchronous)


def test_figures_show_pushes_time_and_staleness():
    found = runs.every_policy([TOY], ["SGD"], SETTING, lambda: None)
    synchronous = found[Key("digits", "SGD", runs.STRAGGLER, runs.SYNCHRONOUS)]
    for over_time, end in ((False, 12), (True, 1e3 * synchronous.duration_s)):
        axes: Any = figures.losses(found, runs.STRAGGLER, over_time).axes[0]
        line, *others = axes.lines[: len(runs.POLICIES)]
        assert line.get_xdata()[-1] == pytest.approx(end)
        x, *values = (value for _, _, value in synchronous.evaluations)
        assert line.get_ydata().tolist() == [x, *values]
        assert len(others) == 6
    drawn: Any = figures.staleness(found, "digits", "SGD").axes
    shares = [sum(bar.get_height() for bar in axes.patches) for axes in drawn]
    assert shares == pytest.approx([100] * 12)
    assert len({(axes.get_xlim(), axes.get_ylim()) for axes in drawn}) == 1


def activity(waiting, ratio):
    """What workers do, in two lines a policy; numbers without a bound are given."""
    return [
        {
            "data": "digits",
            "workers": speeds,
            "policy": policy,
            "waiting (%)": waiting if policy == "τ = 1" else 0.0,
            "compute / rest": ratio if policy == runs.NO_BOUND else 2.0,
            "mean staleness": 7.0,
        }
        for speeds in runs.SPEEDS
        for policy in runs.POLICIES
    ]


@pytest.mark.parametrize(
    ("waiting", "ratio", "verdict"),
    [(0.5, 3.0, "holds"), (40.0, 3.0, "partly"), (0.0, 1.5, "refuted")],
)
def test_verdict_on_waiting(waiting, ratio, verdict):
    claim = claims.never_wait(activity(waiting, ratio))
    assert claim.verdict == verdict
    assert claim.measured == f"0 to {waiting:.0f}"


@pytest.mark.parametrize(
    ("losses", "no_bound", "verdict"),
    [
        ([1.0, 1.2, 1.5, 1.8, "diverged"], 0.9, "partly"),
        ([1.0, 1.2, 1.5, 1.8, "diverged"], 1.0, "holds"),
        ([1.0, 1.2, 1.1, 1.8, 1.9], 0.9, "refuted"),
        ([1.0, 1.0, 1.0, 1.0, 1.0], 0.9, "refuted"),
    ],
    ids=["slower, but faster in time", "slower", "not always", "not at all"],
)
def test_verdict_on_convergence(losses, no_bound, verdict):
    pair = {"data": "digits", "optimizer": "SGD"}
    delayed = [
        pair | dict(zip(map(delays.column, delays.DELAYS), losses, strict=True)),
        pair
        | {"optimizer": delays.LARGER_BATCH}
        | dict.fromkeys(map(delays.column, delays.DELAYS), 2.0),
    ]
    by_policy = [
        pair | {"workers": speeds} | dict.fromkeys(runs.POLICIES, 1.0)
        for speeds in runs.SPEEDS
    ]
    by_policy[1][runs.NO_BOUND] = no_bound
    claim = claims.slows_convergence(delayed, by_policy, by_policy, activity(0.0, 3.0))
    assert claim.verdict == verdict


def test_without_staleness_small_steps_are_one_large_step(found):
    for row in found.tables["mean_loss_over_equally_many_pushes"]:
        assert row["τ = 0"] == pytest.approx(row[runs.SYNCHRONOUS], rel=1e-4)


def test_a_bound_waits_for_the_straggler_and_no_bound_does_not(found):
    rows = by(found.tables["what_workers_do"], "workers", "policy")
    for speeds in runs.SPEEDS:
        assert rows[speeds, runs.NO_BOUND]["waiting (%)"] == 0
        assert rows[speeds, "τ = 0"]["waiting (%)"] > 10
        shares = rows[speeds, "τ = 1"]
        parts = ("computing (%)", "pull and push (%)", "waiting (%)")
        assert sum(shares[part] for part in parts) == pytest.approx(100)
    assert rows[runs.STRAGGLER, "τ = 1"]["waiting (%)"] > 40
    assert rows[runs.EQUAL, "τ = 1"]["waiting (%)"] < 10
    assert rows[runs.EQUAL, runs.SYNCHRONOUS]["highest staleness"] == 0
    assert rows[runs.EQUAL, "τ = 0"]["mean staleness"] == 3.5  # 0 to W - 1
    highest = [rows[runs.STRAGGLER, p]["highest staleness"] for p in runs.POLICIES]
    assert highest == sorted(highest) and highest[-1] > 20


def test_answers_say_what_they_apply_and_drop(found):
    rows = by(found.tables["answers_to_staleness_and_stragglers"], "run")
    assert len(rows) == len(answers.answers(rate=0.1, workers=8)) == 7
    for (name,), row in rows.items():
        late = name == answers.BACKUP
        assert (row["pushes dropped"] > 0) == late
        assert row["pushes applied"] == (63 if late else 64)
    backup, synchronous = rows[answers.BACKUP,], rows[runs.SYNCHRONOUS,]
    assert backup["update_ms"] < synchronous["update_ms"] / 2


def test_answers_have_their_rates():
    gradient, params = jnp.array([2.0]), jnp.array([7.0])
    given = {"staleness": np.int32(4), "stale_params": params}
    steps = {}
    for name, (_, optimizer) in answers.answers(rate=0.6, workers=3).items():
        optimizer = optax.with_extra_args_support(optimizer)
        state = optimizer.init(params)
        updates, _ = optimizer.update(gradient, state, params, **given)
        steps[name] = -float(jax.tree.leaves(updates)[0][0]) / 2
    assert steps == pytest.approx(
        {
            runs.SYNCHRONOUS: 0.6,
            answers.BACKUP: 0.6,
            answers.TIMES_W: 1.8,
            runs.NO_BOUND: 0.2,
            answers.FULL_RATE: 0.6,
            answers.DIVIDED: 0.6 / 4,
            answers.COMPENSATED: 0.2,
        }
    )


def test_workers_at_the_full_rate_go_as_far_as_one_at_w_times_the_rate():
    ways = (Bounded(0), 0.1), (Sequential(), 0.1 * WORKERS)
    ends = [
        runs.train(TOY, policy, tasks.optimizer("SGD", rate), SETTING, runs.EQUAL)
        for policy, rate in ways
    ]
    np.testing.assert_allclose(ends[0].params, ends[1].params, rtol=1e-5)


def test_progress_counts_every_run():
    advanced = []
    setting = dataclasses.replace(SETTING, rounds=1)
    given = [TOY], setting, lambda: advanced.append(1)
    runs.every_policy([TOY], ["SGD"], *given[1:])
    delays.every_delay([TOY], ["SGD"], *given[1:])
    answers.every_answer(*given)
    assert len(advanced) == staleness.count_runs(optimizers=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": 1}, "--workers got 1.*at least 2.*--workers 8"),
        ({"rounds": 0}, "--rounds got 0.*more than 0.*Use 50"),
        ({"compute_ms": -1.0}, "--compute-ms got -1.0.*more than 0"),
        ({"bandwidth_gbit_s": 0.0}, "--bandwidth-gbit-s got 0.0.*more than 0"),
        ({"slowdown": math.inf}, "--slowdown got inf.*finite"),
        ({"noise": -0.1}, "--noise got -0.1.*0 or more.*Use 0.1"),
        ({"latency_us": math.nan}, "--latency-us got nan.*0 or more"),
    ],
)
def test_options_that_do_not_fit(options, message):
    with pytest.raises(ValueError, match=message):
        staleness.Config(**options).check()
    staleness.Config(noise=0.0, latency_us=0.0).check()
