"""The compilers are started as `ledger.absent` starts them: quiet, and several at a time."""

import os

from jaxllm.ledger.compiled import absent

os.environ.update(absent.QUIET)
