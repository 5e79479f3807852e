"""Models are made once for all tests of a file; transformers keeps to itself what it has to say about tiny ones."""

import pytest
import tiny
import transformers

from jaxllm.interop.opening import open_model

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


@pytest.fixture(scope="module", params=tiny.CASES)
def case(request, tmp_path_factory):
    """(theirs, the folder it is saved in, ours)."""
    theirs = tiny.build(request.param)
    folder = tiny.save(theirs, tmp_path_factory.mktemp(request.param))
    return theirs, folder, open_model(str(folder))
