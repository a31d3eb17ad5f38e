"""What the estimators share: files, arguments that they refuse, and imputation in pipelines."""

import os
from pathlib import Path
from typing import Any, ClassVar, Self

import xarray as xr
from sklearn.base import BaseEstimator, OneToOneFeatureMixin, TransformerMixin
from sklearn.utils.validation import check_is_fitted

from gallery._saving import held_estimator, packed, read_tree, unpacked, write_tree

__all__ = ["Imputer", "ZooEstimator"]


class ZooEstimator(BaseEstimator):
    """An estimator with files, and with a refusal of weights of rows."""

    _kept: ClassVar[tuple[str, ...]]  # names of fitted attributes that predictions need
    _no_weights: ClassVar[str]  # why the model has no place for weights of rows

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the fitted estimator to a netCDF file, which ArviZ reads as well.

        The file has `posterior_`, which is made first where it was not used before, and a group
        `estimator` with the parameters of the estimator and what predictions need. Size: that of
        `posterior_`, and of the statistics that a kernel keeps beside its draws; about 3 kB more
        for each variable. `AClassClassifier` keeps what `partial_fit` needs too: the rows, and 8
        bytes x particles for the partition of each row, unless `keep_assignments=False`. The file
        is written as a whole or not at all.

        Parameters
        ----------
        path : str or path-like
            Name of the file.

        Raises
        ------
        ValueError
            Where a parameter cannot be written without pickle, such as a function of your own.
        """
        check_is_fitted(self)
        content = {
            "class": type(self).__name__,
            "parameters": self.get_params(deep=False),
            "fitted": self._contents(),
        }
        tree = self.posterior_.copy()  # ty: ignore[missing-attribute]
        tree["estimator"] = xr.DataTree(packed(content))
        write_tree(tree, Path(path))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read an estimator that `save` has written; it predicts as the fitted one did.

        Parameters
        ----------
        path : str or path-like
            Name of the file.

        Returns
        -------
        estimator
            The fitted estimator. `partial_fit` goes on where `AClassClassifier` had ended; other
            estimators refuse it, and `fit` begins anew.

        Raises
        ------
        ValueError
            Where the file is damaged, or holds something else.
        """
        path, wanted = Path(path), f"{cls.__name__}.save"
        tree = read_tree(path, "a saved estimator", wanted)
        if "estimator" not in tree.children:
            raise ValueError(f"{path}: holds no estimator; wanted a netCDF file of {wanted}")
        try:
            found = unpacked(tree["estimator"].to_dataset())
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        if found["class"] != cls.__name__:
            raise ValueError(f"{path}: {held_estimator(found['class'])}")
        del tree["estimator"]
        estimator = cls(**found["parameters"])
        vars(estimator).update(found["fitted"])
        estimator._restore(tree)
        return estimator

    def _contents(self) -> dict[str, Any]:
        """The fitted attributes that the file holds."""
        common = ("classes_", "class_weight_", "n_features_in_", "feature_names_in_")
        names = (*common, *self._kept)
        return {name: getattr(self, name) for name in names if hasattr(self, name)}

    def _restore(self, tree: xr.DataTree) -> None:
        """Set `posterior_`, and what follows from it and the attributes."""
        raise NotImplementedError

    def _refuse_loaded(self, driver: str = "_driver") -> None:
        """Refuse to learn on, for which a file does not hold enough."""
        if not hasattr(self, driver):
            raise ValueError(
                f"partial_fit: this {type(self).__name__} was loaded from a file, which holds what "
                "predictions need, and not what learning on needs; call fit with all rows."
            )

    def _refuse_others(self, others: dict[str, Any]) -> None:
        """Refuse arguments of `fit` that it does not have, above all `sample_weight`."""
        if others.pop("sample_weight", None) is not None:
            raise TypeError(
                f"sample_weight: {type(self).__name__} takes none, since {self._no_weights}."
            )
        if others:
            raise TypeError(f"fit() got an unexpected keyword argument {next(iter(others))!r}")

    def _refuse_balanced(self) -> None:
        """Refuse class weights that need the labels of all calls."""
        if isinstance(found := getattr(self, "class_weight", None), str):
            raise ValueError(
                f"class_weight: found {found!r}, which needs the labels of all calls, and "
                "partial_fit has those of one; wanted {class: factor} or None."
            )


class Imputer(OneToOneFeatureMixin, TransformerMixin):
    """A classifier that completes tables, as a step of a `Pipeline` or a `ColumnTransformer`."""

    def transform(self, X: Any) -> Any:
        """Return a copy of X with missing entries replaced by predictions from their row.

        It is `impute` without labels, so that rows of the fit and new rows are completed alike:

            make_pipeline(IQGMEClassifier(), LogisticRegression()).fit(X, y)

        Parameters
        ----------
        X : array or frame
            As in `fit`.

        Returns
        -------
        array or frame
            The completed table, of the type of X.
        """
        return self.impute(X)  # ty: ignore[missing-attribute]
