"""Sweeps over pairs, what devices exchange, and a plan for 10^9 pairs: ``python -m benchmarks.matrices.pairs WORK``.

Pairs of a user and an item at random, with log-normal degrees on both sides, and compiled sweeps of the algorithm for
censored pairs (Paquet, Koenigstein and Winther) with all of its steps. Time for the plan is the time of a pair and that
of a vector, from two sizes, times their numbers; nothing of its size was run. Peaks of 10^7 pairs are some gigabytes.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse

from numpyro_ext.infer.bilinear.algorithms import quadratic
from numpyro_ext.infer.bilinear.algorithms import sweeps as core
from numpyro_ext.infer.bilinear.algorithms.schedules.devices import Division, SeveralDevices, place_rows
from numpyro_ext.potentials import LogitPotential
from numpyro_ext.structure.bilinear.form import Background, Bilinear, GaussianSide, Selection, order_cells

from ..harness import COLD, Study, blocks, compile_function, in_turns, table
from .bilinear_once import collective_bytes

_RANK, _ROUNDS = 20, 5
_OPTIONS = quadratic.Options("jaakkola", "tiles", True)
_SIZES = {
    "1e5": (100_000, 11_000, 1_000),
    "1e6": (1_000_000, 110_000, 3_000),
    "1e6, few users": (1_000_000, 20_000, 3_000),
    "1e7": (10_000_000, 1_100_000, 10_000),
}
"""Pairs, users and items."""
_SHARDS = (4, 16, 64, 256)


class Problem(NamedTuple):
    """Numbers of what is stored and computed in a sweep, in single precision."""

    num_pairs: int
    num_users: int
    num_items: int
    rank: int

    @property
    def user_bytes(self) -> int:
        """Means and variances of the vectors of all users, without biases."""
        return 4 * 2 * self.rank * self.num_users

    @property
    def item_sum_bytes(self) -> int:
        """Sums over the pairs of every item: half of a symmetric matrix, and a vector."""
        size = self.rank + 1
        return 4 * self.num_items * (size * (size + 1) // 2 + size)

    @property
    def pair_operations(self) -> float:
        """Additions and multiplications for pairs: moments of four visits, and second moments of both sides."""
        return self.num_pairs * (24.0 * self.rank + 4.0 * (self.rank + 1) ** 2)

    @property
    def solve_operations(self) -> float:
        """The same for the systems of all users."""
        size = self.rank + 1
        return self.num_users * (size**3 / 3.0 + 2.0 * size**2)


PLAN = Problem(10**9, 10**7, 10**5, _RANK)


def make_pairs(num_pairs: int, num_users: int, num_items: int) -> tuple[np.ndarray, np.ndarray]:
    """Different pairs, sorted by user."""
    rng = np.random.default_rng(0)
    shares = [rng.lognormal(0.0, spread, size) for spread, size in ((1.0, num_users), (1.2, num_items))]
    found = np.zeros(0, np.int64)
    while found.size < num_pairs:
        drawn = (
            np.searchsorted(np.cumsum(share) / share.sum(), rng.random(num_pairs), side="right").clip(0, share.size - 1)
            for share in shares
        )
        found = np.unique(np.concatenate([found, next(drawn) * num_items + next(drawn)]))
    users, items = np.divmod(np.sort(rng.choice(found, num_pairs, replace=False)), num_items)
    return users, items


def make_form(users: np.ndarray, items: np.ndarray, sizes: tuple[int, int]) -> Bilinear:
    """Pairs seen once, with biases of both sides, and as many censored ones."""
    size, num = _RANK + 1, users.size
    bias, order = jnp.zeros((1, size)).at[0, _RANK].set(1.0), jnp.zeros(num, int)
    sides = [GaussianSide(jnp.zeros((n, size)), jnp.ones((n, size))) for n in sizes]
    background = Background(jnp.asarray(float(num)), Selection(*(jnp.ones(n) for n in sizes)))
    return order_cells(
        Bilinear(
            *sides, jnp.asarray(users), jnp.asarray(items), jnp.ones((1, _RANK)), bias, bias, jnp.zeros(num),
            LogitPotential(jnp.ones(num, int)), jnp.ones(num), jnp.zeros(()), order, order, background,
        )
    )  # fmt: skip


def sweeps(name: str, draw: int) -> dict[str, Any]:
    """CPU seconds of a sweep, and bytes that stay and that a sweep asks for."""
    num_pairs, *sizes = _SIZES[name]
    users, items = make_pairs(num_pairs, *sizes)
    found: dict[str, Any] = {}
    for dtype in ("float64", "float32"):
        if dtype == "float64" and num_pairs > 10**6:
            continue
        jax.config.update("jax_enable_x64", dtype == "float64")
        form = make_form(users, items, (sizes[0], sizes[1]))
        state = jax.jit(core.init, static_argnums=(2, 3))(form, jax.random.key(0), "diagonal", "diagonal")
        views = jax.jit(quadratic.make_views, static_argnums=1)(form, _OPTIONS)
        form = core.without_cells(form)

        def step(form: Bilinear, state: core.State, views: quadratic.Views) -> core.State:
            return quadratic.sweep(form, state, _OPTIONS, views=views)[0]

        compiled = compile_function(step, form, state, views)
        state = compiled.run()
        compiled = compiled._replace(args=(form, state, views))
        rounds = _ROUNDS if num_pairs <= 10**6 else 2
        seconds = in_turns(rounds, compiled.run)[0]
        held = sum(x.nbytes for x in jax.tree.leaves(views))
        peak = compiled.peak_bytes or 0
        found[dtype] = {"seconds": seconds, "held": held, "peak": peak, "compile": compiled.seconds}
        assert np.isfinite(float(compiled.run().objective))
    return found


def scipy_sweep(draw: int) -> dict[str, float]:
    """Least CPU seconds of three updates of both sides written with SciPy, in double precision, and of the products of
    packed second moments with sparse weights in them.

    Shares of the censored pairs and the tangent of all others are held, and there is no bound.
    """
    num_pairs, *sizes = _SIZES["1e6"]
    index = make_pairs(num_pairs, *sizes)
    found = [_scipy_sweep(index, sizes) for _ in range(3)]
    return {name: min(one[name] for one in found) for name in ("whole", "products")}


def _scipy_sweep(index: tuple[np.ndarray, np.ndarray], sizes: list[int]) -> dict[str, float]:
    num_pairs = index[0].size
    rng, size = np.random.default_rng(1), _RANK + 1
    means = [0.1 * rng.standard_normal((n, size)) for n in sizes]
    variances = [np.full((n, size), 0.5) for n in sizes]
    upper = np.triu_indices(size)
    order = [np.lexsort((index[1 - side], index[side])) for side in (0, 1)]
    starts = [np.concatenate([[0], np.cumsum(np.bincount(index[side], minlength=sizes[side]))]) for side in (0, 1)]
    places = [(index[side][order[side]], index[1 - side][order[side]]) for side in (0, 1)]
    of_all, took = 0.125, {"whole": 0.0, "products": 0.0}

    def sparse(values: np.ndarray, side: int) -> scipy.sparse.csr_matrix:
        return scipy.sparse.csr_matrix((values, places[side][1], starts[side]), (sizes[side], sizes[1 - side]))

    start = time.process_time()
    for side in (0, 1):
        own, other = places[side]
        v, t = means[1 - side].copy(), variances[1 - side].copy()
        bias, spread = v[:, -1].copy(), t[:, -1].copy()
        v[:, -1], t[:, -1] = 1.0, 0.0
        u, s = means[side][own], variances[side][own]
        eta = np.einsum("nk,nk->n", u, v[other]) + bias[other]
        square = eta**2 + np.einsum("nk,nk->n", u**2 + s, t[other]) + np.einsum("nk,nk->n", s, v[other] ** 2)
        xi = np.sqrt(square + spread[other])
        censored = num_pairs / sizes[0] / sizes[1]
        curvature = np.tanh(0.5 * xi) / (4.0 * xi)
        weight = 2.0 * curvature * (1.0 + censored) - 2.0 * of_all * censored
        second = v[:, upper[0]] * v[:, upper[1]]
        second[:, upper[0] == upper[1]] += t
        before = time.process_time()
        packed = sparse(weight, side) @ second + 2.0 * of_all * censored * second.sum(0)
        took["products"] += time.process_time() - before
        linear = sparse(0.5 - weight * bias[other], side) @ v
        linear -= censored * ((0.5 + 2.0 * of_all * bias) @ v)
        precision = np.empty((sizes[side], size, size))
        precision[:, upper[0], upper[1]] = precision[:, upper[1], upper[0]] = packed
        precision += np.eye(size)
        means[side] = np.linalg.solve(precision, linear[..., None])[..., 0]
        variances[side] = 1.0 / np.einsum("nkk->nk", precision)
    took["whole"] = time.process_time() - start
    return took


def exchange(draw: int) -> dict[str, Any]:
    """Bytes that collectives of a sweep on four devices return on each, in single precision."""
    num_pairs, *sizes = _SIZES["1e5"]
    users, items = make_pairs(num_pairs, *sizes)
    jax.config.update("jax_enable_x64", False)
    form = make_form(users, items, (sizes[0], sizes[1]))
    state = jax.jit(core.init, static_argnums=(2, 3))(form, jax.random.key(0), "diagonal", "diagonal")
    method = quadratic.ClosedUpdates(_OPTIONS, True)
    devices = SeveralDevices(Division(jax.devices(), users, items, sizes[0]), method)
    prepare = partial(devices.prepare, places=devices.places)
    prepared = devices.put_cells(jax.jit(prepare)(form, state.rows, state.columns))
    _, state = devices.put(state.objective, state)
    text = jax.jit(devices.sweep).lower(prepared, state).compile().as_text()
    return {"bytes": collective_bytes(text), "devices": len(jax.devices()), "items": sizes[1]}


def loads(draw: int) -> dict[str, Any]:
    """Pairs of the busiest of several shards, in those of all of them on average, by the rule and dealt at random."""
    rng = np.random.default_rng(0)
    found = {}
    for mean in (10, 100):
        degree = np.maximum(1, rng.poisson(mean * rng.lognormal(-0.72, 1.2, 100_000)))
        users = np.repeat(np.arange(degree.size), degree)
        for number in _SHARDS:
            cells = place_rows(users, np.zeros_like(users), degree.size, number).is_cell.sum(1)
            dealt = np.bincount(rng.integers(number, size=degree.size), degree, number)
            found[f"{mean} {number}"] = [float(x.max() * number / users.size) for x in (cells, dealt)]
        found[f"{mean} longest"] = int(degree.max())
    return found


def linear_costs(few: float, many: float) -> tuple[float, float]:
    """Seconds of a pair and of a vector, from sweeps with equally many pairs of few and of many users."""
    (num_pairs, *fewer), (_, *more) = _SIZES["1e6, few users"], _SIZES["1e6"]
    of_vector = (many - few) / (sum(more) - sum(fewer))
    return (few - of_vector * sum(fewer)) / num_pairs, of_vector


def _plan(found: dict[str, list[Any]]) -> Iterator[Iterable[Any]]:
    few, many = (found[name][0]["float32"] for name in ("1e6, few users", "1e6"))
    of_pair, of_vector = linear_costs(few["seconds"], many["seconds"])
    large = found["1e7"][0]["float32"] if found["1e7"] else many
    num_large = _SIZES["1e7" if found["1e7"] else "1e6"][0]
    seconds = of_pair * PLAN.num_pairs + of_vector * (PLAN.num_users + PLAN.num_items)
    exchanged = found["exchange"][0]
    of_items = exchanged["bytes"] / exchanged["items"] * PLAN.num_items
    yield "operations for pairs", "", f"{PLAN.pair_operations:.1e}", "2.2e12"
    yield "operations to solve for users", "", f"{PLAN.solve_operations:.1e}", "4.0e10"
    yield "core-seconds a sweep", f"{seconds:.0f}", "", "4800 to 7700 (5 to 8 minutes on 16 cores)"
    yield "minutes a sweep on 16 cores, were they all alike", f"{seconds / 16 / 60:.1f}", "", "5 to 8"
    yield "GB of pairs in the order of both sides", f"{large['held'] / num_large:.0f}", "", "10 to 16"
    yield "GB of means and variances of users", "", f"{PLAN.user_bytes / 1e9:.1f}", "1.6"
    yield "MB of sums for items", "", f"{PLAN.item_sum_bytes / 1e6:.0f}", "101"
    yield "MB that collectives return on a device", f"{of_items / 1e6:.0f}", "", "101 + 17 + 1"


def main() -> None:
    """Write the page."""
    jobs = {name: partial(sweeps, name) for name in _SIZES}
    jobs |= {"scipy": scipy_sweep, "exchange": exchange, "loads": loads}
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    study = Study(__doc__, jobs, environment={**COLD, **flags})
    found = study.run()

    def rows() -> Iterator[Iterable[Any]]:
        for name, (num_pairs, num_users, num_items) in _SIZES.items():
            for dtype in ("float64", "float32"):
                for one in found[name]:
                    if dtype in one:
                        took = one[dtype]
                        micro = 1e6 * took["seconds"] / num_pairs
                        held, peak = (f"{took[what] / num_pairs:.0f}" for what in ("held", "peak"))
                        yield (
                            num_pairs,
                            num_users,
                            num_items,
                            dtype,
                            f"{micro:.2f}",
                            held,
                            peak,
                            f"{took['compile']:.0f}",
                        )

    def shares() -> Iterator[Iterable[Any]]:
        for number in _SHARDS:
            for one in found["loads"]:
                yield number, *(f"{x:.3f}" for mean in (10, 100) for x in one[f"{mean} {number}"])

    lines = [
        "# Censored pairs by their number",
        f"Sweeps at K = {_RANK} with biases, joint updates, learned selection and the bound: CPU-microseconds and "
        "bytes of a pair. Held are cells in the order of either side; the peak has arguments, results and temporaries "
        "of the compiled sweep.",
        table("pairs | users | items | precision | µs a pair | bytes held | bytes at the peak | s to compile", rows()),
    ]
    if found["1e6"] and found["scipy"]:
        whole, products = (found["scipy"][0][what] / _SIZES["1e6"][0] for what in ("whole", "products"))
        ours = found["1e6"][0]["float32"]["seconds"] / _SIZES["1e6"][0]
        lines.append(
            "Updates of both sides by SciPy in float64, plainly written, without shares, tangent and bound, on the "
            f"same 10^6 pairs: {1e6 * whole:.2f} µs a pair, {1e6 * products:.2f} of it products of sparse weights "
            f"with packed second moments. A whole sweep of ours in float32 takes {ours / whole:.2f} times as long as "
            f"these updates, and {ours / products:.2f} times as long as the products alone (target: 1.0)."
        )
    lines += [
        "Pairs of the busiest shard, in those of an average one: users dealt by their number of pairs, to and fro, and "
        "dealt at random. 100,000 users with log-normal degrees of mean 10 and 100.",
        table("shards | mean 10 | at random | mean 100 | at random", shares()),
    ]
    if all(found[name] for name in ("1e6", "1e6, few users", "exchange")):
        lines += [
            f"## {PLAN.num_pairs:.0e} pairs of {PLAN.num_users:.0e} users and {PLAN.num_items:.0e} items",
            "Extrapolated, not run: times are those of a pair and of a vector from the two rows of 10^6 pairs, bytes "
            "those of a pair of the largest row and of an item in the collectives of four devices.",
            table("what, a sweep in float32 | extrapolated | counted | estimates of the specification", _plan(found)),
        ]
    study.write("pairs", blocks(*lines))


if __name__ == "__main__":
    main()
