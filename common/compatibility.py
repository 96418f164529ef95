"""Which two nodes may exchange KV.

Decides what must be equal at HELLO and what is negotiated; used by the prefill node on HELLO and by the
decode node on HELLO_OK. It must never guess: a field that differs is named, and nothing is converted
silently.
"""

from dataclasses import replace

from common import limits
from common.digests import PrefixIdentity
from common.engines.interface import Capabilities
from common.kv_convert import KvConverter, KvForm
from common.kv_layout import KvLayout
from common.messages import HelloRefused, NodeProfile

MUST_BE_EQUAL = (
    "model_id",
    "weights_digest",
    "tokenizer_digest",
    "layers",
    "kv_heads",
    "head_dim",
    "vocab_size",
)


_SAME_MODEL = (
    "start both nodes with the same --model and the same kind of --backend (emulated ones with the same "
    "--emulated-seed)"
)


def profile_of(capabilities: Capabilities, wire_dtype: str = "") -> NodeProfile:
    """The profile that a node with this engine declares; wire_dtype: how it sends KV, if not as it has it."""
    identity = capabilities.identity
    return NodeProfile(
        model_id=identity.model_id,
        weights_digest=identity.weights_digest,
        tokenizer_digest=identity.tokenizer_digest,
        layers=identity.layers,
        kv_heads=identity.kv_heads,
        head_dim=identity.head_dim,
        vocab_size=identity.vocab_size,
        dtype=capabilities.dtype,
        rope_form=capabilities.rope_form,
        max_tokens=capabilities.max_tokens,
        chunk_tokens=capabilities.chunk_tokens,
        wire_dtype="" if wire_dtype == capabilities.dtype else wire_dtype,
        head_order=capabilities.head_order,
        rotary_dim=capabilities.rotary_dim,
        answers_logits=capabilities.logits,
    )


def engine_form(profile: NodeProfile) -> KvForm:
    """How a node's engine writes KV."""
    return KvForm(profile.dtype, profile.rope_form, profile.head_order, profile.rotary_dim)


def wire_form(profile: NodeProfile) -> KvForm:
    """How a prefill node hands KV over."""
    return replace(engine_form(profile), dtype=profile.wire_dtype or profile.dtype)


def wire_layout(profile: NodeProfile) -> KvLayout:
    """The layout of the slots that a prefill node hands over."""
    dtype = profile.wire_dtype or profile.dtype
    return KvLayout(profile.layers, profile.kv_heads, profile.head_dim, dtype, profile.max_tokens)


def import_converter(prefill: NodeProfile, decode: NodeProfile) -> KvConverter:
    """What a decode node does to the KV that it is handed. Raises ValueError when nothing can be done."""
    return KvConverter(wire_form(prefill), engine_form(decode), decode.head_dim)


def prefix_identity(capabilities: Capabilities, block_tokens: int) -> PrefixIdentity:
    """What KV that this engine keeps in a prefix cache depends on, besides its tokens."""
    identity = capabilities.identity
    form = [capabilities.rope_form, *map(str, capabilities.head_order)]
    return PrefixIdentity(
        model_id=identity.model_id,
        weights_digest=identity.weights_digest,
        dtype=capabilities.dtype,
        wire_form=" ".join(form),
        layers=identity.layers,
        kv_heads=identity.kv_heads,
        row_bytes=capabilities.layout.row_bytes,
        block_tokens=block_tokens,
    )


def differing_fields(prefill: NodeProfile, decode: NodeProfile) -> tuple[str, ...]:
    """Names of the fields that must be equal and are not."""
    return tuple(name for name in MUST_BE_EQUAL if getattr(prefill, name) != getattr(decode, name))


def mismatch_refusal(prefill: NodeProfile, decode: NodeProfile | None) -> HelloRefused | None:
    """Why these two nodes cannot exchange KV, each difference by name, and what to do; None when they can."""
    if decode is None:
        return HelloRefused(False, "a decode node must declare its profile", ("profile",))
    names = differing_fields(prefill, decode)
    clauses = [f"{name}: {getattr(prefill, name)} and {getattr(decode, name)}" for name in names]
    remedies = [_SAME_MODEL] if names else []
    try:
        import_converter(prefill, decode)
    except ValueError as error:
        names += ("dtype",)
        clauses.append(f"dtype: {error}")
        remedies.append("give both nodes the same --dtype")
    if not names:
        return None
    detail = f"prefill node and decode node differ in {'; '.join(clauses)}"
    what = f"{detail}; what to do: {', and '.join(remedies)}"
    return HelloRefused(False, what[: limits.DETAIL_CHARACTERS], names)
