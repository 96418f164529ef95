"""Which nodes may exchange KV: each field that matters is compared, named and shown."""

from dataclasses import fields, replace

import pytest

from common.compatibility import MUST_BE_EQUAL, differing_fields, mismatch_refusal, profile_of
from common.engines.interface import Capabilities, ModelIdentity
from common.messages import NodeProfile
from transport.codec import Header, decode, encode

NEGOTIATED = {"max_tokens", "chunk_tokens", "answers_logits", "keeps_prefixes"}
CONVERTED = {"dtype": "bfloat16", "wire_dtype": "int8", "rope_form": "interleaved", "head_order": (2, 1, 0)}
PROFILE = NodeProfile("m/135M", "aa" * 16, "bb" * 16, 30, 3, 64, 49_152, "float32", "half", 768, 128)


def changed(name: str) -> NodeProfile:
    value = getattr(PROFILE, name)
    return replace(PROFILE, **{name: value + 1 if isinstance(value, int) else f"{value}-other"})


def test_a_node_is_compatible_with_its_like() -> None:
    assert differing_fields(PROFILE, replace(PROFILE)) == ()


@pytest.mark.parametrize("name", [item.name for item in fields(NodeProfile)])
def test_each_field_is_negotiated_or_converted_or_named_when_it_alone_differs(name: str) -> None:
    if name == "rotary_dim":  # which elements turn is the model's, and no conversion changes it
        rotated = replace(PROFILE, rotary_dim=32, rope_form="interleaved")
        assert mismatch_refusal(rotated, PROFILE).fields == ("dtype",)
    elif name in CONVERTED:
        assert mismatch_refusal(replace(PROFILE, **{name: CONVERTED[name]}), PROFILE) is None
    elif name in NEGOTIATED:
        assert mismatch_refusal(changed(name), PROFILE) is None
    else:
        assert mismatch_refusal(PROFILE, changed(name)).fields == (name,)
        assert mismatch_refusal(changed(name), PROFILE).fields == (name,)


@pytest.mark.parametrize("other", ["uint8", "float64"])
def test_kv_that_nothing_can_be_made_of_is_refused_by_the_name_of_its_dtype(other: str) -> None:
    refused = mismatch_refusal(replace(PROFILE, dtype=other), PROFILE)
    assert refused.fields == ("dtype",)
    assert "--dtype" in refused.detail.split("what to do: ")[1]


def test_same_geometry_with_other_weights_or_another_tokenizer_is_refused() -> None:
    assert {"weights_digest", "tokenizer_digest"} <= set(MUST_BE_EQUAL)


def test_all_differing_fields_are_named_with_both_values() -> None:
    theirs = replace(PROFILE, layers=24, dtype="uint8", max_tokens=5)
    refused = mismatch_refusal(PROFILE, theirs)
    assert refused.fields == ("layers", "dtype")
    assert "layers: 30 and 24; dtype: " in refused.detail
    assert refused.detail.endswith(
        "what to do: start both nodes with the same --model and the same kind of --backend "
        "(emulated ones with the same --emulated-seed), and give both nodes the same --dtype"
    )


def test_the_longest_description_still_travels() -> None:
    longest = NodeProfile("x" * 256, *["y" * 64] * 2, *[2**63 - 1] * 4, *["z" * 64] * 2, 2**63 - 1, 2**63 - 1)
    shortest = NodeProfile("", "", "", 0, 0, 0, 0, "", "", 0, 0)
    refused = mismatch_refusal(longest, shortest)
    assert refused.fields == (*MUST_BE_EQUAL, "dtype")
    assert decode(encode(Header(None, 0), refused))[1] == refused


def test_a_profile_says_what_the_engine_declares() -> None:
    identity = ModelIdentity("model", "weights", "tokenizer", 1, 2, 3, 4)
    capabilities = Capabilities(identity, "float16", "interleaved", 5, 6, lanes=7)
    assert profile_of(capabilities) == NodeProfile(
        model_id="model",
        weights_digest="weights",
        tokenizer_digest="tokenizer",
        layers=1,
        kv_heads=2,
        head_dim=3,
        vocab_size=4,
        dtype="float16",
        rope_form="interleaved",
        max_tokens=5,
        chunk_tokens=6,
    )
