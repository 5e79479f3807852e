"""The fields of a config.json: each is used, known not to matter, or refused by name."""

from collections.abc import Mapping
from typing import Any

from jaxllm.errors import UserError

# Fields that change nothing in what the model computes from tokens, and why. Everything else has to be read.
NEUTRAL: dict[str, str] = {
    **dict.fromkeys(
        ("_name_or_path", "name_or_path", "transformers_version", "architectures", "auto_map", "model_type"),
        "say where the file comes from; the kind of model is looked up before",
    ),
    **dict.fromkeys(("torch_dtype", "dtype"), "the tensors say it themselves"),
    **dict.fromkeys(
        ("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id", "decoder_start_token_id"),
        "belong to the tokenizer and the sampler, who read them",
    ),
    **dict.fromkeys(
        (
            *("use_cache", "cache_implementation", "output_attentions", "output_hidden_states", "return_dict"),
            *("return_dict_in_generate", "output_scores", "output_router_logits", "torchscript", "use_bfloat16"),
            *("_attn_implementation", "_attn_implementation_autoset", "attn_implementation", "use_flash_attn"),
            *("chunk_size_feed_forward", "pretraining_tp", "gradient_checkpointing", "reorder_and_upcast_attn"),
            *("tie_last_hidden_states", "use_return_dict", "_flash_attn_2_enabled", "unsloth_version", "unsloth_fixed"),
        ),
        "how a program goes about it, or what it hands out beside the logits",
    ),
    **dict.fromkeys(
        ("attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop", "hidden_dropout", "classifier_dropout"),
        "noise of training; there is none here",
    ),
    **dict.fromkeys(
        (
            *("max_length", "min_length", "do_sample", "temperature", "top_k", "top_p", "typical_p", "num_beams"),
            *("num_beam_groups", "diversity_penalty", "early_stopping", "length_penalty", "repetition_penalty"),
            *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences"),
            *("forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values", "suppress_tokens"),
            *("exponential_decay_length_penalty", "begin_suppress_tokens", "task_specific_params", "prefix"),
        ),
        "how text is drawn; the sampling command has flags of its own",
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
        "of other tasks than language modelling",
    ),
}
# Fields that any file may have, and the values with which they change nothing.
_ONLY: dict[str, tuple[Any, ...]] = {
    "is_decoder": (True, False),  # of a model that is nothing else
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "tie_encoder_decoder": (False,),
    "per_layer_config": (None, {}),
}
_MISSING = object()


class Fields:
    """A table of fields, and which of them have been used.

    Args:
      values: of the file, or of a table in it.
      where: for messages.
    """

    def __init__(self, values: Mapping[str, Any], where: str):
        self._values, self.where = values, where
        self._used: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def get(self, name: str, default: Any) -> Any:
        """A field's value; the default where there is no such field. A null is a value: None."""
        self._used.add(name)
        return self._values.get(name, default)

    def value(self, name: str, default: Any, *others: str) -> Any:
        """The same, where null says no more than a missing field, and of the type of the default.

        Args:
          others: names that the field has in other releases.
        """
        given = {key: self.get(key, None) for key in (name, *others)}
        found = {key: value for key, value in given.items() if value is not None}
        if not found:
            return default
        key, value = next(iter(found.items()))
        if any(other != value for other in found.values()):
            raise UserError(f"{self.where}: {' and '.join(found)} contradict each other; use the file of one release")
        if default is not None and not _fits(value, default):
            raise UserError(f"{self.where}: {key} is {value!r}; it must be like {default!r}")
        return float(value) if isinstance(default, float) else value

    def only(self, name: str, *allowed: Any) -> None:
        """A field that may be there, with values that change nothing.

        Raises:
          UserError: it has another one.
        """
        value = self.get(name, allowed[0])
        if value not in allowed:
            told = " or ".join(map(repr, allowed))
            raise UserError(f"{self.where}: {name} is {value!r}, which jaxllm has no model for; it can do {told}")

    def unused(self) -> list[str]:
        """Fields that nobody has asked for and that are not known to change nothing."""
        return sorted(name for name in self._values if name not in self._used and name not in NEUTRAL)

    def finish(self, neutral: bool = True) -> None:
        """To be called when all has been read.

        Args:
          neutral: False for a table in the file, where the fields of NEUTRAL mean something else.
        Raises:
          UserError: there are fields that were not.
        """
        if neutral:
            for name, allowed in _ONLY.items():
                self.only(name, *allowed)
            self._refuse_quantized()
        left = self.unused() if neutral else sorted(set(self._values) - self._used)
        if left:
            told = ", ".join(f"{name} = {self._values[name]!r}" for name in left)
            raise UserError(
                f"{self.where} has fields that jaxllm does not know, with which the model may compute something else: "
                f"{told}; take them out if they do not matter"
            )

    def _refuse_quantized(self) -> None:
        table = self.get("quantization_config", None)
        if table:
            method = table.get("quant_method") if isinstance(table, dict) else None
            raise UserError(
                f"{self.where}: quantization_config says that the weights are quantized (quant_method {method!r}), "
                "which is not read; use the release in bfloat16, float16 or float32, or a .gguf file"
            )


def _fits(value: Any, default: Any) -> bool:
    """Whether a value is of the type of a default; a whole number is a number, and true is none."""
    if isinstance(value, bool) or isinstance(default, bool):
        return isinstance(value, bool) and isinstance(default, bool)
    return isinstance(value, (int, float) if isinstance(default, float) else type(default))
