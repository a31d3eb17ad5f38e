"""Cases of `tests.bench.same`: estimators, and what they say of rows and entries."""

from typing import Any

import numpy as np
import numpyro.distributions as dist

import gallery
from tests.bench.same_cases import Record, case, choices, clusters, entries, islands, reals, told


def answers(estimator: Any, *asked: Any) -> Record:
    """What a classifier says of rows."""
    return {"predict": estimator.predict(*asked), "predict_proba": estimator.predict_proba(*asked)}


@case()
def aclass_classifier() -> Record:
    x, y = reals()
    fitted = gallery.AClassClassifier(num_samples=20, random_state=0).fit(x[:24], y[:24])
    fitted.partial_fit(x[24:], y[24:])
    rows, classes = fitted.sample(5)
    found = {"impute": fitted.impute(x), "sample": rows, "classes": classes}
    found |= {"evidence": fitted.log_evidence_} | told(fitted.posterior_)
    return found | answers(fitted, x)


@case(x64=False, is_double=True)
def archipelago_classifier() -> Record:
    x, y = islands()
    settings = {"num_warmup": 2, "num_samples": 3, "num_chains": 2, "random_state": 0}
    tame = dist.LogNormal(0.5, 0.2)
    fitted = gallery.ArchipelagoClassifier(amplitude=tame, **settings).fit(x, y)
    rows, classes = fitted.sample(4)
    return {"sample": rows, "classes": classes} | told(fitted.posterior_) | answers(fitted, x + 0.1)


def of_experts(fitted: Any, *asked: Any) -> Record:
    """What is in all classifiers by local experts."""
    mean, deviation = fitted.impute(*asked, return_std=True)
    found = {"mean": mean, "deviation": deviation, "n_experts": fitted.n_experts_}
    return found | told(fitted.posterior_) | answers(fitted, *asked)


@case(x64=False, is_double=True)
def iqgme_classifier() -> Record:
    x, y = reals()
    fitted = gallery.IQGMEClassifier(4, max_iter=100, num_samples=5, random_state=0).fit(x, y)
    return {"elbo": fitted.elbo_} | of_experts(fitted, x)


@case(x64=False, is_double=True)
def iqgme_classifier_among_factors() -> Record:
    x, y = reals(columns=8)
    settings = {"n_factors": 3, "max_iter": 100, "num_samples": 5, "random_state": 0}
    fitted = gallery.IQGMEClassifier(3, **settings).fit(x, y)
    return {"elbo": fitted.elbo_} | of_experts(fitted, x)


@case(x64=False, is_double=True)
def iqgme_classifier_by_draws() -> Record:
    x, y = reals()
    settings = {"inference": "gibbs", "max_iter": 2, "num_samples": 3, "random_state": 0}
    return of_experts(gallery.IQGMEClassifier(4, **settings).fit(x, y), x)


@case(x64=False, is_double=True)
def iqgme_tasks_classifier() -> Record:
    x, y = reals(rows=48)
    task = np.array(["a", "b", "c"])[np.arange(48) % 3]
    settings = {"max_iter": 60, "num_samples": 5, "random_state": 0}
    fitted = gallery.MultiTaskIQGMEClassifier(3, 4, **settings).fit(x, y, task)
    found = {"elbo": fitted.elbo_, "shares": fitted.shares_, "similarity": fitted.similarity()}
    mean, deviation = fitted.impute(x, task, return_std=True)
    found |= {"mean": mean, "deviation": deviation}
    return found | told(fitted.posterior_) | answers(fitted, x, task)


@case(x64=False)
def augment_reduce_classifier() -> Record:
    x, y = choices()
    fitted = gallery.AugmentReduceClassifier(max_iter=200, batch_size=20, random_state=0).fit(x, y)
    fitted.partial_fit(x[:30], y[:30])
    best, share = fitted.top_k(x, 3)
    found = {"elbo": fitted.elbo_, "best": best, "share": share}
    return found | told(fitted.posterior_) | answers(fitted, x)


@case(x64=False, is_double=True)
def staged_classifier() -> Record:
    x = clusters(36)
    y = np.arange(36) % 2
    settings = {"max_order": 2, "num_live": 50, "num_samples": 20, "random_state": 0}
    fitted = gallery.StagedMixtureClassifier(**settings).fit(x, y)
    found = {"orders": fitted.orders_, "order_posterior": fitted.order_posterior_}
    return found | told(fitted.posterior_) | answers(fitted, x + 0.1)


@case(x64=False, is_double=True)
def bsvd_completer() -> Record:
    matrix = entries(12, 10)
    data = tuple(matrix[name] for name in ("row", "column", "value"))
    settings = {"num_components": 4, "num_warmup": 2, "num_samples": 3, "random_state": 0}
    fitted = gallery.BSVDCompleter(matrix["shape"], **settings).fit(data)
    rows, columns = np.divmod(np.arange(120), 10)
    mean, deviation = fitted.predict(rows, columns, return_std=True)
    found = {"mean": mean, "deviation": deviation, "suggest": np.array(fitted.suggest(4))}
    return found | {"sample": fitted.sample(rows[:9], columns[:9], n=5)} | told(fitted.posterior_)
