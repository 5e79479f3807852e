"""Llama 3.1's RoPE scaling in GGUF files: the tensor of factors is mapped back to the scaling parameters."""

import dataclasses

import numpy as np
import pytest
from gguf_files import rewritten, write
from gguf_models import LLAMA3

from jaxllm.errors import UserError
from jaxllm.interop.gguf import file as gguf_file
from jaxllm.interop.gguf import model as gguf
from jaxllm.interop.gguf import rope


def test_factors_of_llama_3_stand_for_their_numbers(tmp_path):
    write(tmp_path / "m.gguf", LLAMA3)
    factors = gguf_file.open_tensors(tmp_path / "m.gguf").read("rope_freqs.weight")
    multipliers = 1 / factors
    np.testing.assert_allclose(multipliers[:15], 1)
    np.testing.assert_allclose(multipliers[15:18], [0.605573, 0.303743, 0.103448], rtol=0, atol=5e-7)
    np.testing.assert_allclose(multipliers[18:], 0.03125)
    opened = gguf.open_file(tmp_path / "m.gguf").model
    assert opened.rope_scaling == "llama3"
    assert rope.equivalent(opened, LLAMA3)
    # Older converters did not write the original context length; the value of the releases is recovered.
    other = rewritten(tmp_path / "m.gguf", tmp_path / "o.gguf", {"llama.rope.scaling.original_context_length": None})
    assert gguf.open_file(other).model == opened
    for change in ({"rope_low_freq_factor": 2.0}, {"rope_factor": 8.0}, {"rope_original_context": 4096}):
        assert not rope.equivalent(dataclasses.replace(opened, **change), LLAMA3)


def test_other_factors_are_solved_or_refused(tmp_path):
    odd = dataclasses.replace(LLAMA3, rope_low_freq_factor=1.5, rope_high_freq_factor=6.0, rope_original_context=16384)
    write(tmp_path / "odd.gguf", odd)
    assert rope.equivalent(gguf.open_file(tmp_path / "odd.gguf").model, odd)
    factors = np.linspace(1, 9, 32).astype(np.float32)
    path = rewritten(tmp_path / "odd.gguf", tmp_path / "m.gguf", tensors={"rope_freqs.weight": factors})
    with pytest.raises(UserError, match=r"rope_freqs.weight does not match Llama 3.1's RoPE scaling"):
        gguf.open_file(path)
    path = rewritten(tmp_path / "odd.gguf", tmp_path / "m.gguf", tensors={"rope_freqs.weight": factors[:5]})
    with pytest.raises(UserError, match=r"5 factors for head_dim 64"):
        gguf.open_file(path)
