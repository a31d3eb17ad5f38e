"""Cases of `tests.bench.same`: algorithms that are no chains."""

from collections.abc import Callable, Iterable
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal

import zoo
from inference import (
    AugmentReduce,
    CoordinateAscent,
    DataTempering,
    Driver,
    ImportanceFinish,
    MergedStages,
    NestedSampler,
    Orders,
    ParticleFilter,
    Staged,
    run_orders,
)
from tests.bench.same_cases import (
    KEY,
    QUIET,
    Record,
    bits,
    case,
    choices,
    clusters,
    line_data,
    reals,
    run,
    told,
)
from tests.inference import mixtures
from tests.inference.models import LABELS, X, logistic
from tests.inference.nests import line, two_modes
from zoo import aclass as parts
from zoo.augment_reduce import SparseRows
from zoo.staged_learning import family, order_prior

aclass = zoo.load("aclass").model
augment_reduce = zoo.load("augment_reduce").model
iqgme = zoo.load("iqgme").model
iqgme_factors = zoo.load("iqgme_factors").model
iqgme_tasks = zoo.load("iqgme_tasks").model


# Filters.


@case()
def filter_of_reals() -> Record:
    x, y = reals()
    kernel = ParticleFilter(aclass, num_particles=30)
    return run(kernel, x, y, chains=2, component=parts.normal_inverse_chi2)


@case(x64=False)
def filter_of_bits() -> Record:
    x, y = bits()
    return run(ParticleFilter(aclass, num_particles=30, resampling="systematic"), x, y, chains=3)


@case()
def filter_of_mixed_columns() -> Record:
    x, y = reals(rows=24, columns=6)
    x[:, 0] = np.where(np.isnan(x[:, 0]), np.nan, x[:, 0] > 0)
    x[:, 1] = np.digitize(np.nan_to_num(x[:, 1]), [-1.0, 1.0])
    x[:, 2] = np.floor(np.abs(x[:, 2]))
    x[:, 3:] = np.where(np.isnan(x[:, 3:]).any(1, keepdims=True), np.nan, x[:, 3:])
    component = parts.mixed(
        bit=([0], parts.beta_bernoulli),
        code=([1], partial(parts.dirichlet_categorical, num_values=3)),
        count=([2], parts.gamma_poisson),
        real=([3], parts.normal_inverse_chi2),
        pair=([4, 5], parts.normal_inverse_wishart),
    )
    return run(ParticleFilter(aclass, num_particles=20), x, y, component=component, max_groups=3)


@case()
def filter_over_grid() -> Record:
    x, y = bits(rows=24)
    settings = {"resampling": "multinomial", "grid": {"alpha": [0.1, 0.3, 1.0, 3.0]}}
    kernel = ParticleFilter(aclass, num_particles=20, rejuvenate=2, **settings)
    return run(kernel, x, y, alpha=dist.Gamma(1.0, 1.0))


@case()
def filter_goes_on() -> Record:
    """It is stopped, extended, and given more rows."""
    x, y = reals()
    model = {"component": parts.normal_inverse_chi2, "all_labelled": False}
    kernel = ParticleFilter(aclass, num_particles=20)
    driver = Driver(kernel, num_warmup=10, **QUIET)
    found = told(driver.run(KEY, x[:24], y[:24], **model), "stopped")
    found |= told(driver.extend(100), "extended")
    driver.update(x[24:], y[24:], **model)
    return found | told(driver.tree(), "updated")


@case()
def filter_is_resumed() -> Record:
    x, y = bits()
    with TemporaryDirectory() as folder:
        for steps in (15, None):
            kernel = ParticleFilter(aclass, num_particles=20)
            driver = Driver(kernel, num_warmup=steps, checkpoint=f"{folder}/run", **QUIET)
            tree = driver.run(KEY, x, y)
        return told(tree.load())


# Evidence.

mixture = family(2, num_classes=0)


@case()
def nested_line() -> Record:
    return run(NestedSampler(line, num_live=100), *line_data())


@case()
def nested_modes() -> Record:
    return run(NestedSampler(two_modes, num_live=100), chains=2)


@case()
def nested_mixture() -> Record:
    """Its clusters may change places."""
    return run(NestedSampler(mixture, num_live=60), clusters())


@case()
def finish_of_mixture() -> Record:
    kernel = ImportanceFinish(NestedSampler(mixture, num_live=60), num_draws=2000)
    return run(kernel, clusters())


@case()
def staged_line() -> Record:
    """Three stages, and one more."""
    x, y = line_data(90)
    driver = Driver(Staged(line, num_stages=3, num_live=60), **QUIET)
    found = told(driver.run(KEY, x[:60], y[:60]))
    driver.update(x[60:], y[60:])
    return found | told(driver.tree(), "updated")


@case()
def staged_mixture() -> Record:
    return run(Staged(mixture, num_stages=2, num_live=50), clusters())


@case()
def staged_by_codes() -> Record:
    """Stages hand on mixtures on Hilbert curves."""
    return run(Staged(mixture, num_stages=2, num_live=50, summary="code"), clusters())


@case()
def merged_mixtures() -> Record:
    x = clusters()
    return merged(mixture, [(x[:20],), (x[20:],)], x)


def merged(model: Callable, shares: Iterable[tuple], *data: Any) -> Record:
    """Workers learn a share each, and are put together: a kernel that is given drivers."""
    workers = []
    for number, share in enumerate(shares):
        worker = Driver(Staged(model, num_stages=1, num_live=50), **QUIET)
        worker.run(KEY + number, *share)
        workers.append(worker)
    return run(MergedStages(workers), *data)


@case()
def tempered_line() -> Record:
    """Three stages, and one more."""
    x, y = line_data(60)
    driver = Driver(DataTempering(line, num_stages=3, num_particles=60), **QUIET)
    found = told(driver.run(KEY, x[:45], y[:45]))
    driver.update(x[45:], y[45:])
    return found | told(driver.tree(), "updated")


@case()
def tempered_mixture() -> Record:
    return run(DataTempering(mixture, num_stages=2, num_particles=60), clusters(), chains=2)


@case()
def orders_by_nested() -> Record:
    make, told_orders = partial(family, num_classes=0), {"most": 2, "settings": QUIET}
    kernel = partial(NestedSampler, num_live=50)
    tree = run_orders(KEY, make, order_prior(), clusters(24), kernel=kernel, **told_orders)
    return told(tree)


@case()
def orders_go_on() -> Record:
    """They are given more rows."""
    x, make = clusters(), partial(family, num_classes=0)
    kernel = partial(DataTempering, num_stages=1, num_particles=50)
    orders = Orders(make, order_prior(), kernel=kernel, most=2, settings=QUIET)
    found = told(orders.run(KEY, x[:24]))
    orders.update(x[24:])
    return found | told(orders.tree(), "updated")


# Bounds.


@case()
def ascent() -> Record:
    x, y = reals()
    return run(CoordinateAscent(iqgme), x, y, steps=100, num_experts=4)


@case()
def ascent_of_three_classes() -> Record:
    """From the best of two starts."""
    x, y = reals()
    y = np.where((y == 1) & (np.nan_to_num(x[:, 0]) > 0), 2, y)
    model = {"num_experts": 4, "num_classes": 3, "expert": mixtures.KNOWN}
    return run(CoordinateAscent(iqgme, restarts=2), x, y, steps=60, **model)


@case()
def ascent_of_columns() -> Record:
    """Without labels: bits, counts, and reals that are correlated."""
    x, _ = reals(rows=30, columns=2)
    filled = np.nan_to_num(x)
    columns = {
        "bits": np.where(np.isnan(x), np.nan, x > 0),
        "counts": np.floor(np.abs(filled)),
        "covariances": filled,
    }
    found = {}
    for name, table in columns.items():
        model = {"num_experts": 3, **mixtures.CASES[name]}
        tree = run(CoordinateAscent(iqgme), np.asarray(table, float), steps=20, draws=5, **model)
        found |= {f"{name}/{path}": values for path, values in tree.items()}
    return found


@case()
def ascent_by_batches() -> Record:
    x, y = reals(rows=80)
    return run(CoordinateAscent(iqgme, batch_size=20), x, y, steps=40, num_experts=4)


@case()
def ascent_among_factors() -> Record:
    x, y = reals(columns=8)
    return run(CoordinateAscent(iqgme_factors), x, y, steps=60, num_experts=3, num_factors=2)


@case()
def ascent_of_tasks() -> Record:
    x, y = reals(rows=48)
    task = np.arange(48) % 3
    return run(CoordinateAscent(iqgme_tasks), x, y, task, steps=60, num_groups=3, num_experts=4)


def reduced(noise: str, x: Any = None, model: Record | None = None, **options: Any) -> Record:
    """Some steps of augment and reduce."""
    features, y = choices()
    sizes = {"num_classes": 8, "batch_size": 10, "num_negatives": 3, **(model or {})}
    kernel, x = AugmentReduce(augment_reduce, **options), features if x is None else x
    return run(kernel, x, y, steps=200, draws=3, noise=noise, **sizes)


@case()
def reduced_softmax() -> Record:
    return reduced("gumbel")


@case()
def reduced_probit() -> Record:
    return reduced("normal")


@case()
def reduced_logistic() -> Record:
    return reduced("logistic")


@case(x64=False)
def reduced_posterior() -> Record:
    return reduced("gumbel", posterior=True)


@case()
def reduced_sparse_rows() -> Record:
    """Few of their features are not 0, and classes answer to combinations of them."""
    rng = np.random.default_rng(8)
    columns = np.argsort(rng.random((60, 12)), 1)[:, :3].astype(np.int32)
    x = SparseRows(columns, rng.normal(size=(60, 3)), 12)
    return reduced("gumbel", x, {"rank": 2}, init_scale=0.1)


@case(x64=False)
def svi_of_logistic() -> Record:
    kernel = SVI(logistic, AutoNormal(logistic), numpyro.optim.Adam(0.02), Trace_ELBO())
    groups = ("log_likelihood", "log_prior", "posterior_predictive", "prior")
    return run(kernel, X, LABELS, steps=200, groups=groups)
