"""Small synthetic trees: what the runs of each kind of kernel leave behind, good ones and
spoiled ones.
"""

import json

import numpy as np
import xarray as xr


def tree_of(groups: dict[str, dict], **attrs) -> xr.DataTree:
    """Groups of name -> (dims, array)."""
    tree = xr.DataTree.from_dict(
        {group: xr.Dataset(variables) for group, variables in groups.items()}
    )
    for node in tree.children.values():
        node.dataset = node.to_dataset().assign_coords(
            {dim: np.arange(size) for dim, size in node.sizes.items()}
        )
    tree.attrs |= attrs
    return tree


def replaced(tree, group, name, values):
    """The tree with other values of one variable; (dims, values) makes a new one."""
    data = tree[group].to_dataset()
    tree[group].dataset = data.assign(
        {name: values if isinstance(values, tuple) else (data[name].dims, values)}
    )
    return tree


def failed(page):
    """Names of the checks that failed."""
    return {verdict.name for verdict in page.verdicts if verdict.ok is False}


def chains(rng, num_chains=4, draws=500, **attrs) -> xr.DataTree:
    shape = (num_chains, draws)
    posterior = {
        "mean": (["chain", "draw"], rng.normal(size=shape)),
        "effect": (["chain", "draw", "school"], rng.normal(size=(*shape, 3))),
    }
    stats = {
        "diverging": (["chain", "draw"], np.zeros(shape, bool)),
        "energy": (["chain", "draw"], rng.normal(size=shape)),
        "lp": (["chain", "draw"], rng.normal(size=shape)),
    }
    defaults = {
        "model": "schools",
        "kernel": "NUTS",
        "sampling_time": 10.0,
        "ended": "budget",
        "steps": 1000,
    }
    return tree_of({"posterior": posterior, "sample_stats": stats}, **(defaults | attrs))


def variational(
    rng, replicates=3, steps=400, draws=1000, sd_q=1.0, with_q=True, **attrs
) -> xr.DataTree:
    """q = N(0, sd_q) against the posterior N(0, 1) of one parameter; prior N(0, sqrt 2), a
    likelihood of the same width.
    """
    z = sd_q * rng.normal(size=(replicates, draws))
    normal = lambda x, sd: -0.5 * (x / sd) ** 2 - np.log(sd) - 0.5 * np.log(2 * np.pi)
    elbo = -20 - 30 * np.exp(-np.arange(steps) / 20) + 0.3 * rng.normal(size=(replicates, steps))
    groups = {
        "posterior": {"z": (["chain", "draw"], z)},
        "sample_stats": {"elbo": (["chain", "step"], elbo)},
        "variational_parameters": {"loc": (["chain"], np.zeros(replicates))},
        "log_prior": {"z": (["chain", "draw"], normal(z, np.sqrt(2)))},
        "log_likelihood": {
            "y": (["chain", "draw", "row"], normal(z, np.sqrt(2))[..., None] * np.ones(1))
        },
    }
    if with_q:
        groups["log_q"] = {"log_q": (["chain", "draw"], normal(z, sd_q))}
    return tree_of(
        groups, **({"model": "one", "kernel": "StochasticVI", "ended": "budget"} | attrs)
    )


def particles(rng, replicates=3, steps=20, size=200, genealogy="mixed", **attrs) -> xr.DataTree:
    parents = np.stack(
        [
            [
                np.sort(rng.integers(0, size, size)) if t % 5 == 0 else np.arange(size)
                for t in range(steps)
            ]
            for _ in range(replicates)
        ]
    )
    if genealogy == "collapsed":
        parents[:, steps // 2] = 0
    resampled = np.array([[t % 5 == 0 for t in range(steps)]] * replicates)
    ess = size * rng.uniform(0.4, 0.9, size=(replicates, steps))
    groups = {
        "posterior": {"z": (["chain", "draw"], rng.normal(size=(replicates, 100)))},
        "sample_stats": {
            "ess": (["chain", "step"], ess),
            "resampled": (["chain", "step"], resampled),
            "ancestor": (["chain", "step", "particle"], parents),
        },
        "particles": {
            "log_weight": (["chain", "particle"], np.full((replicates, size), -np.log(size)))
        },
    }
    each = -50 + 0.1 * rng.normal(size=replicates)
    defaults = {
        "kernel": "ParticleFilter",
        "ended": "finished",
        "log_evidence": float(each.mean()),
        "log_evidence_se": 0.1,
    }
    return tree_of(groups, **(defaults | {"log_evidence_of_replicates": each} | attrs))


def tempered(rng, replicates=3, steps=12, size=200, se=0.2, halfway=0.8, **attrs) -> xr.DataTree:
    """Particles that go from one distribution to the next by exponents, and walk at each."""
    over = lambda values: (
        ["chain", "step"],
        np.broadcast_to(values, (replicates, steps)) * np.ones((replicates, 1)),
    )
    each = -50 + se * rng.normal(size=replicates)
    groups = {
        "posterior": {"z": (["chain", "draw"], rng.normal(size=(replicates, 100)))},
        "sample_stats": {
            "ess": over(size * 0.5),
            "exponent": over(np.tile(np.linspace(0.1, 1.0, steps // 2), 2)),
            "halfway": over(halfway + 0.05 * rng.normal(size=(replicates, steps))),
            "log_evidence": over(np.linspace(-1, -50, steps)),
        },
        "particles": {
            "log_weight": (["chain", "particle"], np.full((replicates, size), -np.log(size)))
        },
    }
    defaults = {
        "kernel": "DataTempering",
        "ended": "finished",
        "log_evidence": float(each.mean()),
        "log_evidence_of_replicates": each,
        "log_evidence_se_of_replicates": np.full(replicates, se),
    }
    return tree_of(groups, **(defaults | attrs))


def nested(rng, replicates=2, steps=2000, num_live=100, skew=1.0, **attrs) -> xr.DataTree:
    """`skew` above 1 puts new points too low among the live ones, as a sampler that moves too
    little does.
    """
    ranks = np.floor(num_live * rng.uniform(size=(replicates, steps)) ** skew).astype(int)
    volume = -np.arange(steps) / num_live * np.ones((replicates, 1))
    weight = volume - 0.5 * ((volume + 8) / 1.5) ** 2
    running = np.logaddexp.accumulate(weight, axis=1)
    information, se = 8.0, np.sqrt(8.0 / num_live)
    each = -30 + se * rng.normal(size=replicates)
    groups = {
        "posterior": {"z": (["chain", "draw"], rng.normal(size=(replicates, 100)))},
        "sample_stats": {
            "insertion_rank": (["chain", "step"], ranks),
            "log_volume": (["chain", "step"], volume),
            "log_evidence": (["chain", "step"], running + (each - running[:, -1])[:, None]),
        },
        "particles": {"log_weight": (["chain", "particle"], weight)},
    }
    defaults = {
        "kernel": "NestedSampler",
        "kernel_settings": json.dumps({"NestedSampler.num_live": num_live}),
        "ended": "finished",
        "log_evidence": float(each.mean()),
        "log_evidence_se": se / np.sqrt(replicates),
        "log_evidence_of_replicates": each,
        "log_evidence_se_of_replicates": np.full(replicates, se),
        "information_of_replicates": np.full(replicates, information),
    }
    return tree_of(groups, **(defaults | attrs))
