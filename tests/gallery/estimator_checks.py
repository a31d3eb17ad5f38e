"""Checks of scikit-learn that no estimator needs a fit for: they run with every test run, of
every estimator.
"""

__all__ = ["NOTHING_FITTED"]

NOTHING_FITTED = {
    "check_classifiers_regression_target",
    "check_complex_data",
    "check_do_not_raise_errors_in_init_or_set_params",
    "check_estimator_cloneable",
    "check_estimators_empty_data_messages",
    "check_estimators_unfitted",
    "check_fit1d",
    "check_no_attributes_set_in_init",
    "check_parameters_default_constructible",
    "check_requires_y_none",
    "check_set_params",
    "check_valid_tag_types",
}
