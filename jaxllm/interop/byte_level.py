"""Bytes and tokens of a tokenizer.json: the bytes of each token, and a file whose tokens are single bytes."""

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jaxllm.errors import UserError


def token_bytes(tokenizer: tokenizers.Tokenizer, decoder: dict | None, where: str) -> list[bytes]:
    """Returns the bytes that each id decodes to, derived from its name and the type of the file's decoder.

    Args:
      tokenizer: the parsed file.
      decoder: the "decoder" field of the file; None if there is none.
      where: name of the file, for messages.
    Raises:
      UserError: the decoder is of a type under which the bytes of a token depend on its neighbours.
    """
    steps = (decoder or {}).get("decoders", [decoder or {}])
    kinds = {step.get("type") for step in steps}
    marks = {step["pattern"].get("String") for step in steps if step.get("type") == "Replace"}
    marks |= {step["replacement"] for step in steps if step.get("type") == "Metaspace"}
    if "ByteLevel" not in kinds and "▁" not in marks:
        found = ", ".join(sorted(filter(None, kinds))) or "none"
        raise UserError(
            f"{where} has the unsupported decoder {found}; use a byte-level BPE or SentencePiece-like tokenizer "
            "(decoder ByteLevel, Metaspace, or Replace of ▁)"
        )
    added = tokenizer.get_added_tokens_decoder()
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocabulary.values(), default=-1) + 1)
    alphabet = byte_alphabet()
    for name, i in vocabulary.items():
        if i in added:  # stored as plain text, whatever the decoder
            table[i] = b"" if added[i].special else added[i].content.encode()
        elif "ByteLevel" in kinds:
            known = all(char in alphabet for char in name)
            table[i] = bytes(alphabet[char] for char in name) if known else name.encode()
        elif "ByteFallback" in kinds and len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
            table[i] = bytes.fromhex(name[3:5])
        else:
            table[i] = name.replace("▁", " ").encode()
    return table


def byte_alphabet() -> dict[str, int]:
    """Maps each printable character that byte-level BPE uses to the byte it represents.

    Bytes that are printable in Latin-1 represent themselves; the others use code points from 256 up, in order.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [value for value in range(256) if value not in printable]
    return {chr(value): value for value in printable} | {chr(256 + n): value for n, value in enumerate(others)}


def byte_tokenizer(end: str) -> tokenizers.Tokenizer:
    """Returns byte-level BPE without merges: ids 0 to 255 are the bytes, 256 is a special token.

    Args:
      end: name of the special token.
    """
    built = tokenizers.Tokenizer(models.BPE(vocab=byte_alphabet(), merges=[]))
    # Without merges the pre-tokenizer has no effect; GPT-2's is used because other formats have a name for it.
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    built.add_special_tokens([end])
    return built
