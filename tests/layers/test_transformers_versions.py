"""The versions of transformers that are refused, and functions of it that have changed."""

import importlib
import warnings
from importlib import metadata

import pytest
import transformers

from ds_fp8 import layers
from ds_fp8.config.errors import UserError
from ds_fp8.layers import transformers_versions as versions


def test_the_installed_version_has_known_functions():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        versions.warn_of_changes.__wrapped__(transformers.__version__)


def test_a_version_that_the_tests_do_not_pass_with_is_refused_unless_asked_for(monkeypatch):
    with pytest.raises(UserError, match=r"transformers 5\.24\.0 is not supported") as raised:
        versions.check_version("5.24.0")
    assert f"pip install 'transformers{versions.KNOWN}'" in str(raised.value)
    monkeypatch.setenv(versions.TRY, "5.24.0")
    versions.check_version("5.24.0")


def test_the_version_is_checked_when_layers_are_imported(monkeypatch):
    monkeypatch.setattr(metadata, "version", lambda name: "4.57")
    with pytest.raises(UserError, match=r"transformers 4\.57 is not supported"):
        importlib.reload(layers)


def test_a_changed_function_is_named(monkeypatch):
    path = next(path for path in versions.DIGESTS if path.endswith("ForCausalLMLoss"))
    monkeypatch.setitem(versions.DIGESTS, path, ("another",))
    with pytest.warns(UserWarning, match=r"tested versions: ForCausalLMLoss\. Compare"):
        versions.warn_of_changes.__wrapped__(transformers.__version__)
