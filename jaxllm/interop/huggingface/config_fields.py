"""Fields of config.json with a record of use: every field is read, known to be neutral, or an error."""

import json
import pathlib
from collections.abc import Mapping
from typing import Any

from jaxllm.errors import UserError
from jaxllm.interop.huggingface import packed_weights

# Fields that do not affect what the model computes from tokens, with the reason. All others must be read.
NEUTRAL: dict[str, str] = {
    **dict.fromkeys(
        ("_name_or_path", "name_or_path", "transformers_version", "architectures", "auto_map", "model_type"),
        "origin of the file; model_type is read separately",
    ),
    **dict.fromkeys(("torch_dtype", "dtype"), "the tensors have dtypes of their own"),
    **dict.fromkeys(
        ("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id", "decoder_start_token_id"),
        "read with the tokenizer",
    ),
    **dict.fromkeys(
        (
            *("use_cache", "cache_implementation", "output_attentions", "output_hidden_states", "return_dict"),
            *("return_dict_in_generate", "output_scores", "output_router_logits", "torchscript", "use_bfloat16"),
            *("_attn_implementation", "_attn_implementation_autoset", "attn_implementation", "use_flash_attn"),
            *("chunk_size_feed_forward", "pretraining_tp", "gradient_checkpointing", "reorder_and_upcast_attn"),
            *("tie_last_hidden_states", "use_return_dict", "_flash_attn_2_enabled", "unsloth_version", "unsloth_fixed"),
        ),
        "implementation choices, and outputs other than logits",
    ),
    **dict.fromkeys(
        ("attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop", "hidden_dropout", "classifier_dropout"),
        "dropout, which jaxllm does not use",
    ),
    **dict.fromkeys(
        (
            *("max_length", "min_length", "do_sample", "temperature", "top_k", "top_p", "typical_p", "num_beams"),
            *("num_beam_groups", "diversity_penalty", "early_stopping", "length_penalty", "repetition_penalty"),
            *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences"),
            *("forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values", "suppress_tokens"),
            *("exponential_decay_length_penalty", "begin_suppress_tokens", "task_specific_params", "prefix"),
        ),
        "sampling defaults; the sampling command has its own flags",
    ),
    **dict.fromkeys(
        (
            *(
                "id2label",
                "label2id",
                "num_labels",
                "problem_type",
                "finetuning_task",
                "pruned_heads",
                "tokenizer_class",
            ),
            *("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels"),
            *("summary_first_dropout", "tf_legacy_loss", "cross_attention_hidden_size"),
        ),
        "other tasks than language modelling",
    ),
}
# Fields that any file may have, and the values at which they have no effect.
_EXPECTED: dict[str, tuple[Any, ...]] = {
    "is_decoder": (True, False),  # no effect on a decoder-only model
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "tie_encoder_decoder": (False,),
    "per_layer_config": (None, {}),
}
_MISSING = object()


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """Reads a JSON file that contains an object.

    Raises:
      UserError: the file cannot be read, is not JSON, or is not an object.
    """
    try:
        value = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error}); use a folder that contains it") from error
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}); download it again") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} must contain a JSON object; download it again")
    return value


class Fields:
    """Fields of a JSON object, with a record of which have been read.

    Args:
      values: content of the file, or of an object in it.
      where: name of the file or object, for messages.
    """

    def __init__(self, values: Mapping[str, Any], where: str):
        self._values, self.where = values, where
        self._used: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def get(self, name: str, default: Any) -> Any:
        """Returns the value of a field, or the default if the field is missing. A null is returned as None."""
        self._used.add(name)
        return self._values.get(name, default)

    def value(self, name: str, default: Any, *others: str) -> Any:
        """Returns the value of a field, or the default if the field is missing or null.

        Args:
          name: name of the field.
          default: default value; a value in the file must have its type, or be an int if it is a float.
          *others: names of the field in other releases.
        Raises:
          UserError: the value is of another type, or two names have different values.
        """
        given = {key: self.get(key, None) for key in (name, *others)}
        found = {key: value for key, value in given.items() if value is not None}
        if not found:
            return default
        key, value = next(iter(found.items()))
        if any(other != value for other in found.values()):
            raise UserError(f"{self.where}: {' and '.join(found)} have different values; use the file of one release")
        if default is not None and not _fits(value, default):
            raise UserError(
                f"{self.where}: {key} is {value!r}; it must be a {type(default).__name__}, such as {default!r}"
            )
        return float(value) if isinstance(default, float) else value

    def expect(self, name: str, *allowed: Any) -> None:
        """Checks that a field is missing or has one of the allowed values.

        Raises:
          UserError: it has another value.
        """
        value = self.get(name, allowed[0])
        if value not in allowed:
            supported = ", ".join(map(repr, allowed))
            raise UserError(
                f"{self.where}: {name} is {value!r}, which is unsupported; supported values are {supported}"
            )

    def unused(self) -> list[str]:
        """Lists the fields that have not been read and are not in `NEUTRAL`."""
        return sorted(name for name in self._values if name not in self._used and name not in NEUTRAL)

    def finish(self, neutral: bool = True) -> None:
        """Checks that no field is left unread. Call it after all fields have been read.

        Args:
          neutral: False for an object within the file, in which the names of `NEUTRAL` have another meaning.
        Raises:
          UserError: fields were not read, or the weights are quantized by an unsupported method.
        """
        if neutral:
            for name, allowed in _EXPECTED.items():
                self.expect(name, *allowed)
            self._reject_unsupported_quantization()
        left = self.unused() if neutral else sorted(set(self._values) - self._used)
        if left:
            listed = ", ".join(f"{name} = {self._values[name]!r}" for name in left)
            raise UserError(
                f"{self.where} has unsupported fields, which might change what the model computes: {listed}; remove "
                "them if they do not"
            )

    def _reject_unsupported_quantization(self) -> None:
        table = self.get(packed_weights.FIELD, None)
        if table:
            packed_weights.read_format(table, self.where)


def _fits(value: Any, default: Any) -> bool:
    """Checks that a value has the type of a default; an int is accepted for a float, a bool only for a bool."""
    if isinstance(value, bool) or isinstance(default, bool):
        return isinstance(value, bool) and isinstance(default, bool)
    return isinstance(value, (int, float) if isinstance(default, float) else type(default))
