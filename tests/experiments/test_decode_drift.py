"""Comparison of rows of different batch sizes, on tokens whose differences are known."""

import decode_drift
import pytest
from decode_drift import Drift

PROMPTS = ("a", "bb", "ccc")


def tokens(prompt, count=6):
    return [100 * len(prompt) + i for i in range(count)]


def same(prompts):
    return [tokens(prompt) for prompt in prompts]


@pytest.mark.parametrize(
    ("alone", "together", "position"),
    [
        ([1, 2, 3], [1, 2, 3], None),
        ([1, 2, 3], [1, 9, 3], 1),
        ([1, 2, 3], [9, 9, 9], 0),
        ([1, 2, 3], [1, 2], 2),
        ([], [4], 0),
    ],
)
def test_the_first_difference(alone, together, position):
    assert decode_drift.first_difference(alone, together) == position


def test_rows_that_are_what_they_are_alone():
    alone, rows, found = decode_drift.drifts(same, PROMPTS, (1, 2, 4))
    assert (alone, rows, found) == (same(PROMPTS), {2: 4, 4: 4}, [])


def test_every_batch_has_its_size_and_every_prompt_comes():
    batches = []

    def continued(prompts):
        batches.append(prompts)
        return same(prompts)

    decode_drift.drifts(continued, PROMPTS, (1, 2, 8))
    assert [len(batch) for batch in batches] == [1, 1, 1, 2, 2, 8]
    assert set(batches[3] + batches[4]) == set(batches[5]) == set(PROMPTS)


def test_a_row_that_drifts_in_a_large_batch_is_found():
    def continued(prompts):
        rows = same(prompts)
        if len(prompts) == 4:
            rows[1][3:] = [7, 8, 9]  # the second row, of prompt bb
            rows[2] = rows[2][:5]  # the third ends early
        return rows

    _, rows, found = decode_drift.drifts(continued, PROMPTS, (1, 2, 4))
    assert rows == {2: 4, 4: 4}
    assert found == [Drift(4, 1, 3, 203, 7), Drift(4, 2, 5, 305, -1)]


def test_a_verdict_that_fails():
    def part(differ, widest):
        return {"rows": {"2": {"run": 8, "differ": differ}}, "widest gap at a difference": widest}

    right = {"float32": part(0, 0.0), "bfloat16": part(3, 0.1)}
    assert all(decode_drift.verdict({"dtypes": right}).values())
    drifted, jumped = right | {"float32": part(1, 0.0)}, right | {"bfloat16": part(3, 1.5)}
    assert list(decode_drift.verdict({"dtypes": drifted}).values()) == [False, True]
    assert list(decode_drift.verdict({"dtypes": jumped}).values()) == [True, False]
