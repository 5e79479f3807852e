"""Creates each model once per test file, and silences transformers' messages about tiny models."""

import pytest
import tiny
import transformers

from jaxllm.interop.opening import open_model

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


@pytest.fixture(scope="module", params=tiny.CASES)
def case(request, tmp_path_factory):
    """Returns (transformers model, folder it is saved in, jaxllm model)."""
    theirs = tiny.build(request.param)
    folder = tiny.save(theirs, tmp_path_factory.mktemp(request.param))
    return theirs, folder, open_model(str(folder))
