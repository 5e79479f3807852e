"""Names of formats, and the models that they fit."""

import dataclasses

import models
import pytest

from jaxllm.errors import UserError
from jaxllm.quantize import formats
from jaxllm.quantize.formats import QuantFormat

MODEL = dataclasses.replace(models.ROTARY, width=128, heads=4, head_dim=32, mlp_width=384)


def test_flags_and_names():
    assert formats.parse("int8") == QuantFormat(8, 0) == formats.from_name("int8")
    assert formats.parse("int4") == QuantFormat(4, 128) == formats.from_name("int4")
    assert (
        formats.parse("int4-asymmetric", "64") == QuantFormat(4, 64, False) == formats.from_name("int4-64-asymmetric")
    )
    assert formats.from_name("bf16") is None
    with pytest.raises(UserError, match="--quantize is 'int3'"):
        formats.parse("int3")
    with pytest.raises(UserError, match="--group is '48'; supported sizes are 32, 64, 128 and channel"):
        formats.parse("int8", "48")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"width": 192}, "query, key and value weights has 192 inputs .* 128 do not divide; give --group 32 or 64"),
        ({"heads": 3}, "output weight has 96 inputs .* give --group 32 or channel"),
        ({"mlp_width": 200}, "down weight has 200 inputs .* give --group channel"),
        ({"mlp_width": 201}, "down weight has 201 inputs .* quantize to int8"),
    ],
)
def test_widths_that_groups_do_not_divide_are_refused(change, message):
    formats.check(MODEL, formats.parse("int4", "128"))
    with pytest.raises(UserError, match=message):
        formats.check(dataclasses.replace(MODEL, **change), formats.parse("int4", "128"))
