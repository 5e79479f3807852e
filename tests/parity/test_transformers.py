"""Models compared with transformers, family by family: logits, continuations, gradients, and folders both ways."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import torch
import transformers

from jaxllm.config.attention import PLAIN
from jaxllm.decode.sampling import SamplingOptions
from jaxllm.engine.generator import Generator
from jaxllm.engine.request import SampleRequest
from jaxllm.interop import rules
from jaxllm.interop.huggingface import folder_rules
from jaxllm.interop.huggingface import model as huggingface
from jaxllm.interop.huggingface.safetensors_files import open_tensors
from jaxllm.interop.opening import open_model
from jaxllm.interop.tokenizer import Tokenizer
from jaxllm.model.transformer import SAVE_ALL, forward, logits
from jaxllm.parallel.collectives import SINGLE_DEVICE
from jaxllm.step.gradients import loss_sums

TOLERANCE = 1e-4
# Within every window and context, and beyond all of them.
LENGTHS = (7, 100)


def prompt(length: int) -> np.ndarray:
    return np.random.default_rng(length).integers(0, tiny.VOCABULARY, length)


def their_logits(model, tokens: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor(tokens[None])).logits[0].numpy()


def our_logits(model, params, tokens: np.ndarray) -> np.ndarray:
    def run(params, tokens):
        positions = jnp.arange(tokens.shape[1])[None]
        hidden, _, _ = forward(params, tokens, positions, model)
        return logits(hidden, params, model)

    return np.asarray(jax.jit(run)(params, jnp.asarray(tokens[None]))[0])


def distance(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Returns the largest difference relative to the largest value."""
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


class Letters(Tokenizer):
    """Tokenizer that maps every id to one character."""

    def __init__(self):
        super().__init__([bytes([32 + i]) for i in range(tiny.VOCABULARY)])

    def encode(self, text, special=False):
        return np.array([ord(letter) - 32 for letter in text], np.int32)


@pytest.mark.parametrize("length", LENGTHS)
def test_logits(case, length):
    theirs, _, ours = case
    tokens = prompt(length)
    found = our_logits(ours.model, ours.load(np.float32), tokens)
    assert distance(found, their_logits(theirs, tokens)) <= TOLERANCE


@pytest.mark.parametrize("length", LENGTHS)
def test_greedy_continuation(case, length, request, tmp_path):
    """Greedy continuations of 64 tokens agree; jaxllm decodes with its cache."""
    theirs, _, ours = case
    if ours.model.rope_scaling == "longrope" and length < tiny.ORIGINAL:
        # Transformers switches the factors when a text outgrows its original context; a jaxllm cache selects one set
        # by its capacity (`transformer._angles`). So the short run stays within the original context.
        name = request.node.callspec.params["case"]
        theirs = tiny.build(name, original_max_position_embeddings=128)
        ours = open_model(str(tiny.save(theirs, tmp_path)))
    tokens = prompt(length)
    theirs.generation_config.pad_token_id = 0
    asked = torch.tensor(tokens[None])
    with torch.no_grad():  # without a mask it would treat tokens 0 of the prompt as padding
        wanted = theirs.generate(
            asked, attention_mask=torch.ones_like(asked), max_new_tokens=64, do_sample=False, eos_token_id=None
        )
    generator = Generator(ours.model, ours.load(np.float32), Letters(), jnp.float32)
    request = SampleRequest(max_new_tokens=64, sampling=SamplingOptions(temperature=0.0))
    (result,), _ = generator.generate(["".join(chr(32 + t) for t in tokens)], request)
    assert result.tokens == wanted[0, length:].tolist()


def test_loss_and_gradients(case, tmp_path):
    """Loss and gradients of a training batch agree, tensor by tensor under the checkpoint's names."""
    theirs, _, ours = case
    tokens = np.stack([prompt(41), prompt(42)[:41]])
    theirs.zero_grad()
    loss = theirs(torch.tensor(tokens), labels=torch.tensor(tokens)).loss
    loss.backward()

    model = dataclasses.replace(ours.model, router_aux_weight=0.0)
    batch = {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "positions": np.broadcast_to(np.arange(40), (2, 40)),
        "segment_ids": np.ones((2, 40), np.int32),
        "weights": np.full((2, 40), 1 / 80, np.float32),
    }
    step_spec = types.SimpleNamespace(model=model, remat=SAVE_ALL, attention=PLAIN, attention_chunk=0, loss_chunk=32)
    step = jax.jit(jax.value_and_grad(lambda params, batch: loss_sums(params, batch, step_spec, SINGLE_DEVICE)[0]))
    value, gradient = step(ours.load(np.float32), batch)
    assert abs(float(value) - loss.item()) <= TOLERANCE * loss.item()

    # jaxllm gradients, exported like weights under the published names.
    with torch.no_grad():
        carrier = type(theirs)(theirs.config)
        for mine, parameter in zip(carrier.parameters(), theirs.parameters(), strict=True):
            mine.copy_(parameter.grad)
    files = open_tensors(tiny.save(carrier, tmp_path))
    found = dict(rules.save(model, folder_rules.build_rules(model, ours.family), gradient))
    assert found.keys() == files.entries.keys()
    # Some gradients are only rounding errors (softmax ignores a key bias): these are compared at the others' scale.
    largest = max(np.abs(files.read(name)).max() for name in files.entries)
    for name, ours_of_it in found.items():
        wanted = files.read(name)
        scale = max(np.abs(wanted).max(), 1e-2 * largest)
        assert np.abs(ours_of_it - wanted).max() <= TOLERANCE * scale, name


def test_export_and_import_again(case, tmp_path):
    theirs, folder, ours = case
    params = ours.load(np.float32)
    out = tmp_path / "out"
    out.mkdir()
    written = huggingface.export(out, ours.model, params, np.dtype(np.float32), shard_bytes=1 << 14, family=ours.family)
    assert written == ours.family
    again = transformers.AutoModelForCausalLM.from_pretrained(
        out, attn_implementation="eager", dtype=torch.float32
    ).eval()
    for length in LENGTHS:
        assert np.array_equal(their_logits(again, prompt(length)), their_logits(theirs, prompt(length)))
    back = open_model(str(out))
    assert back.model == ours.model
    assert jax.tree.all(jax.tree.map(np.array_equal, back.load(np.float32), params))
    first, second = open_tensors(folder), open_tensors(out)
    assert first.entries.keys() == second.entries.keys()
    for name in first.entries:
        assert np.array_equal(first.read(name), second.read(name)), name


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("llama2", {"rope_theta": 9_000.0}),
        ("llama3", {"rope_factor": 4.0}),
        ("mistral", {"window": tiny.WINDOW + 1}),
        ("gemma2", {"attention_softcap": 5.0}),
        ("gemma3", {"rope_theta_sliding": 0.0}),
        ("qwen3", {"norm_eps": 1e-3}),
        ("qwen3-moe", {"normalize_routing": False}),
        ("smollm3", {"pattern": ("full",) * 4}),
        ("phi4-mini", {"rope_dim": 10, "rope_short_factors": (1.0,) * 5, "rope_long_factors": (1.0,) * 5}),
    ],
)
def test_a_wrong_number_is_noticed(name, fault, tmp_path):
    """Each planted fault alone breaks parity on the long prompt."""
    theirs = tiny.build(name)
    ours = open_model(str(tiny.save(theirs, tmp_path)))
    params, tokens = ours.load(np.float32), prompt(100)
    wanted = their_logits(theirs, tokens)
    assert distance(our_logits(ours.model, params, tokens), wanted) <= TOLERANCE
    assert distance(our_logits(dataclasses.replace(ours.model, **fault), params, tokens), wanted) > 10 * TOLERANCE


def test_swapped_heads_are_noticed(tmp_path):
    theirs = tiny.build("llama2")
    ours = open_model(str(tiny.save(theirs, tmp_path)))
    params, tokens = ours.load(np.float32), prompt(7)
    q = params["layers"][0]["attn"]["q"]
    params["layers"][0]["attn"]["q"] = q[:, :, ::-1]
    assert distance(our_logits(ours.model, params, tokens), their_logits(theirs, tokens)) > 10 * TOLERANCE
